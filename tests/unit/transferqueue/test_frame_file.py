"""The file of long values: no two live places overlap, what was written is read, and a failure costs no space."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from meshrl.contract.errors import CorruptError
from meshrl.transferqueue.stores import _frame_file
from meshrl.transferqueue.stores._frame_file import BLOCK, FrameFile, Place, Value, is_long

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Iterator[FrameFile]:
    made = FrameFile(tmp_path)
    made.open({})
    yield made
    made.close()


def put(file: FrameFile, **values: Value) -> dict[bytes, Place]:
    """Written and committed."""
    places = file.write({key.encode(): value for key, value in values.items()})
    file.sync()
    file.committed(places, places)
    return places


def aligned(content: bytes) -> memoryview:
    """Memory that begins at a block, as lent memory does."""
    memory = mmap.mmap(-1, len(content))
    memory[:] = content
    return memoryview(memory).toreadonly()


def bounds(places: list[Place]) -> list[tuple[int, int]]:
    return sorted((place.start, place.start + place.blocks) for place in places)


def assert_sound(file: FrameFile, live: dict[bytes, Place], withheld: list[Place]) -> None:
    """Places and gaps cover the file, each byte once; no two gaps touch."""
    gaps = [(start, start + size) for start, size in file._free]
    assert gaps == sorted(gaps)
    assert all(one[1] < other[0] for one, other in pairwise(gaps))
    at = 0
    for start, end in sorted([*gaps, *bounds([*live.values(), *withheld])]):
        assert start == at and end > start
        at = end
    assert at == file.size_bytes() == file.path.stat().st_size if at else True


@pytest.mark.parametrize("seed", range(6))
def test_at_random_nothing_overlaps_and_everything_is_read_back(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed)
    monkeypatch.setattr(_frame_file, "GROW_BYTES", 4 * MIB)
    file = FrameFile(tmp_path)
    file.open({})
    live: dict[bytes, Place] = {}
    content: dict[bytes, bytes] = {}
    frozen: dict[Place, bytes] | None = None
    """What an export that is under way may still read."""
    sizes = (1, BLOCK - 1, BLOCK, BLOCK + 1, 128 * KIB, 128 * KIB + 5, 300_000, MIB)
    limit = 24 * MIB
    for step in range(250):
        values: dict[bytes, Value] = {}
        for number in range(dice.randrange(6)):
            key = dice.choice([*live, b"%d-%d" % (step, number)])
            value = dice.randbytes(dice.choice(sizes))
            values[key] = aligned(value) if dice.random() < 0.3 else value
        places = file.write(values)
        if dice.random() < 0.15:  # no commit followed
            file.take_back(places)
        else:
            file.committed(values, places)
            live |= places
            content |= {key: bytes(value) for key, value in values.items()}
        gone: list[bytes] = []
        while sum(place.blocks for place in live.values()) > limit or (live and not gone):
            key = dice.choice([*live])
            gone.append(key)
            del live[key], content[key]
        file.committed(gone, {})
        if frozen is None and dice.random() < 0.05:
            file.begin_reading()
            frozen = {place: content[key] for key, place in live.items()}
        elif frozen is not None and dice.random() < 0.2:
            assert {place: file.read(place.encode()) for place in frozen} == frozen
            file.end_reading()
            frozen = None
        if dice.random() < 0.1:
            file.open(live)
        if dice.random() < 0.1 and frozen is None:
            file.close()
            file = FrameFile(tmp_path)
            file.open(live)
        assert_sound(file, live, file._withheld)
        assert frozen is not None or not file._withheld
    assert {key: file.read(place.encode()) for key, place in live.items()} == content
    assert file.size_bytes() < 2.5 * limit, "with what an export withheld"
    file.committed(list(live), {})
    if frozen is not None:
        file.end_reading()
    assert file._free == [(0, file.size_bytes())], "one gap again"
    file.close()


def test_a_load_with_bounded_live_bytes_has_a_bounded_file(
    file: FrameFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator alone, with sizes from 128 KiB to 4 MiB in an order that is not that of the writes."""
    monkeypatch.setattr(FrameFile, "_grow", grown_without_a_disk)
    dice = random.Random(7)
    live: dict[bytes, Place] = {}
    held = 0
    for step in range(1500):
        sizes = {b"%d-%d" % (step, n): dice.randint(128 * KIB, 4 * MIB) for n in range(8)}
        places = dict(zip(sizes, file._take(sizes.values()), strict=True))
        file.committed(sizes, places)
        live |= places
        held += sum(place.blocks for place in places.values())
        keys = [*live]
        dice.shuffle(keys)
        gone: list[bytes] = []
        while held > 256 * MIB:
            gone.append(keys.pop())
            held -= live.pop(gone[-1]).blocks
        file.committed(gone, {})
    assert file.size_bytes() < 1.6 * 256 * MIB


def grown_without_a_disk(file: FrameFile, size: int) -> None:
    file._insert(file._end, size)
    file._end += size


@pytest.mark.parametrize("size", [128 * KIB, 128 * KIB + 1, 40 * BLOCK, 64 * MIB, 64 * MIB + 9])
@pytest.mark.parametrize("source", [bytes, aligned])
def test_each_size_is_read_back(
    file: FrameFile, size: int, source: Callable[[bytes], Value]
) -> None:
    value = random.Random(size).randbytes(size)
    places = put(file, one=source(value), two=b"between", three=source(value))
    assert [file.read(place.encode()) for place in places.values()] == [value, b"between", value]


@pytest.mark.parametrize("source", [bytes, aligned])
def test_one_commit_of_many_values(file: FrameFile, source: Callable[[bytes], Value]) -> None:
    """Linux takes 1,024 parts in one write, and a value may be two."""
    values = {b"%d" % number: source(b"%5d" % number * 1000) for number in range(3000)}
    places = file.write(values)
    assert all(file.read(places[key].encode()) == value for key, value in values.items())


def test_what_looks_like_a_place_is_kept_as_a_value(file: FrameFile) -> None:
    value = Place(4096, 5).encode()
    assert is_long(value) and not is_long(value[:-1]) and not is_long(b"x" * len(value))
    (place,) = put(file, key=value).values()
    assert file.read(place.encode()) == value


@pytest.mark.parametrize("bit", range(0, 27 * 8, 5))
def test_a_place_with_another_bit_is_none(bit: int) -> None:
    changed = bytearray(Place(1 << 20, 300_000).encode())
    changed[bit // 8] ^= 1 << bit % 8
    assert Place.of(bytes(changed)) is None


def assert_takes_a_value(file: FrameFile) -> None:
    value = bytes(range(256)) * 1024
    (place,) = put(file, key=value).values()
    assert file.read(place.encode()) == value


def test_a_file_system_without_direct_writes(
    file: FrameFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refusing(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    assert_takes_a_value(file)


def test_a_file_system_that_refuses_direct_writes_later(
    file: FrameFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening succeeds there, and each write of such blocks is an invalid argument."""
    written = os.pwritev

    def refusing(handle: int, parts: list[memoryview], at: int) -> int:
        if os.get_blocking(handle) and flags_of(handle) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return written(handle, parts, at)

    monkeypatch.setattr(os, "pwritev", refusing)
    assert_takes_a_value(file)


def flags_of(handle: int) -> int:
    (line,) = [
        line
        for line in Path(f"/proc/self/fdinfo/{handle}").read_text().splitlines()
        if line.startswith("flags:")
    ]
    return int(line.split()[1], 8)


def fails(*arguments: object) -> int:
    raise OSError(errno.EIO, "Input/output error")


def writes_half(handle: int, parts: list[memoryview], at: int) -> int:
    return os.pwrite(handle, parts[0][:BLOCK], at)


@pytest.mark.parametrize(
    ("call", "failing"),
    [("pwritev", fails), ("pwritev", writes_half), ("posix_fallocate", fails)],
)
def test_a_write_that_fails_takes_no_space_and_changes_nothing(
    file: FrameFile,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    failing: Callable[..., int],
) -> None:
    live = put(file, one=b"1" * MIB, two=b"2" * MIB)
    live |= {b"two": put(file, two=b"3" * MIB)[b"two"]}
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing)
        with pytest.raises(OSError, match=r"No space left|Input/output error"):
            file.write({b"%d" % number: bytes(5 * MIB) for number in range(20)})
    assert_sound(file, live, [])
    assert file.read(live[b"one"].encode()) == b"1" * MIB
    put(file, four=b"4" * MIB)
    assert file.read(live[b"two"].encode()) == b"3" * MIB


def test_a_disk_that_is_nearly_full_is_not_filled_by_growing(
    file: FrameFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last bytes are for the records of rows that leave."""
    grown: list[int] = []
    allocate = os.posix_fallocate

    def counted(handle: int, at: int, size: int) -> None:
        grown.append(size)
        allocate(handle, at, size)

    class Nearly:
        f_frsize = 4096
        f_bavail = (100 * MIB) // 4096

    monkeypatch.setattr(os, "posix_fallocate", counted)
    monkeypatch.setattr(os, "fstatvfs", lambda handle: Nearly)
    put(file, one=bytes(MIB))
    assert grown == [100 * MIB // 64 // BLOCK * BLOCK]
    with pytest.raises(OSError, match="No space left"):
        file.write({b"two": bytes(101 * MIB)})
    assert len(grown) == 1, "not even tried"


def test_the_map_of_an_earlier_moment_stays_readable_until_the_last_reader_ends(
    file: FrameFile,
) -> None:
    (old,) = put(file, key=b"old" * MIB).values()
    file.begin_reading()
    put(file, key=b"new" * MIB)
    file.begin_reading()
    file.end_reading()
    for number in range(30):
        put(file, other=b"%d" % (number % 10) * 3 * MIB)
    assert file.read(old.encode()) == b"old" * MIB
    file.end_reading()
    assert file._withheld == []


def test_what_a_commit_of_unknown_outcome_deleted_stays_readable(file: FrameFile) -> None:
    """It failed and yet LMDB holds it: an export that began before reads what it deleted."""
    places = put(file, kept=b"kept" * MIB, gone=b"gone" * MIB)
    file.begin_reading()
    file.open({b"kept": places[b"kept"]})
    put(file, new=b"newer" * MIB)
    assert file.read(places[b"gone"].encode()) == b"gone" * MIB
    file.end_reading()
    assert_sound(file, file._places, [])


def test_places_that_overlap_are_not_given_away_again(tmp_path: Path) -> None:
    """Damage: an old page of LMDB says where values once were. Nothing sound may be written over because of it."""
    file = FrameFile(tmp_path)
    file.open({})
    places = put(file, a=b"a" * MIB, b=b"b" * MIB, c=b"c" * MIB)
    file.close()
    wrong = Place(places[b"a"].start + 8 * BLOCK, MIB)
    file = FrameFile(tmp_path)
    file.open({**places, b"w": wrong, b"again": places[b"c"]})
    file.committed([b"w", b"again"], {})
    new = put(file, **{f"n{number}": b"n" * MIB for number in range(80)})
    taken = bounds([*places.values(), *new.values()])
    assert all(one[1] <= other[0] for one, other in pairwise(taken))
    assert [file.read(places[key].encode()) for key in (b"a", b"b", b"c")] == [
        letter * MIB for letter in (b"a", b"b", b"c")
    ]
    file.close()


@pytest.mark.parametrize("left", [None, 0, BLOCK + 5])
def test_a_file_that_is_gone_or_cut_is_refused(tmp_path: Path, left: int | None) -> None:
    file = FrameFile(tmp_path)
    file.open({})
    places = put(file, key=b"x" * MIB)
    file.close()
    if left is None:
        file.path.unlink()
    else:
        os.truncate(file.path, left)
    with pytest.raises(CorruptError, match=r"frames\.dat is gone or cut short.*restore a backup"):
        file.open(places)
    file.close()


def test_a_file_that_is_opened_again_goes_on_for_a_reader(file: FrameFile) -> None:
    (place,) = put(file, key=b"x" * MIB).values()
    file.begin_reading()
    handle = file._cached
    file.open({b"key": place})
    assert file._cached == handle, "the reader may be in the middle of a read"
    file.end_reading()


def test_a_value_that_cannot_be_read_is_missing_and_said(
    file: FrameFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (place,) = put(file, key=b"x" * MIB).values()
    assert file.read(Place(place.start, 200 * MIB).encode()) is None
    assert "ends in the middle of a value" in caplog.text
    monkeypatch.setattr(os, "pread", fails)
    assert file.read(place.encode()) is None
    assert "cannot be read at" in caplog.text
