"""Pages that are in order and wrong: lost by the disk, put in another's place, older than the rest of the file."""

from __future__ import annotations

import contextlib
import re
import shutil
from itertools import pairwise
from pathlib import Path

import lmdb
import pytest

from meshrl.contract.errors import CorruptError, WaitTimeoutError
from meshrl.contract.frames import with_checksum
from meshrl.testing.contract.queue_actors import Actors, spec, tasks
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import Operation, Table
from meshrl.transferqueue.stores.disk import DiskStore

PAGE = 4096
GROUP, TASK = b"g" + bytes(11), b"t" + bytes(11)
LEAF, OVERFLOW = 2, 4
"""What LMDB writes into bytes 10 and 11 of a page."""


async def stored(folder: Path) -> tuple[bytes, bytes]:
    """A closed store with frames of several pages; its file before the last write, and now."""
    actors = Actors(await TransferQueue.open(DiskStore(folder)))
    await actors.start(spec(max_staleness=50.0, lease_ttl_s=1e6))
    await actors.feed(tasks(40, extra_info={"story": "once upon a time " * 400}))
    lease = await actors.lease("rollout", limit=40)
    await actors.queue.close()
    data = folder / "data.mdb"
    before = data.read_bytes()
    actors.queue = await TransferQueue.open(DiskStore(folder))
    await actors.write(lease)
    await actors.queue.close()
    return before, data.read_bytes()


def pages(data: bytes, kind: int, holding: bytes = b"") -> list[int]:
    """Where the pages of a kind begin that have `holding` somewhere."""
    return [
        at
        for at in range(2 * PAGE, len(data), PAGE)
        if data[at + 10] == kind and holding in data[at : at + PAGE]
    ]


def swapped(data: bytes, one: int, other: int) -> bytes:
    found = bytearray(data)
    found[one : one + PAGE], found[other : other + PAGE] = (
        data[other : other + PAGE],
        data[one : one + PAGE],
    )
    return bytes(found)


async def refused(folder: Path, data: bytes, why: str = "restore a backup") -> None:
    (folder / "data.mdb").write_bytes(data)
    with pytest.raises(CorruptError, match=why) as raised:
        await TransferQueue.open(DiskStore(folder))
    assert "\n" not in str(raised.value)


async def read_back(folder: Path, data: bytes) -> str:
    """What a queue on the file says of its rows, or why it does not."""
    (folder / "data.mdb").write_bytes(data)
    try:
        queue = await TransferQueue.open(DiskStore(folder))
    except CorruptError as error:
        return str(error)
    ledger = await queue.ledger("run")
    await queue.close()
    return str(ledger)


async def test_a_record_that_is_older_than_the_rest_is_found_out(tmp_path: Path) -> None:
    """What a lost write leaves: a page that is in order, with records as they once were."""
    store = DiskStore(tmp_path)
    await store.load()
    records = [
        Operation(Table.META, b"k%03d" % number, with_checksum(b"%03d as it was " % number * 50))
        for number in range(40)
    ]
    await store.apply(records)
    changed = with_checksum(b"020 as it is.. " * 50)
    await store.apply([Operation(Table.META, b"k020", changed)])
    await store.close()
    data = (tmp_path / "data.mdb").read_bytes()
    old = pages(data, LEAF, records[20].value or b"")[-1]
    (at,) = pages(data, LEAF, changed)
    lost = data[:at] + data[old : old + PAGE] + data[at + PAGE :]
    (tmp_path / "data.mdb").write_bytes(lost)
    with pytest.raises(CorruptError, match=r"40 records are not the 40 of .* restore a backup"):
        await TransferQueue.open(DiskStore(tmp_path))


async def test_leaves_in_each_others_place_are_found_out(tmp_path: Path) -> None:
    _, now = await stored(tmp_path)
    sound = await read_back(tmp_path, now)
    leaves = pages(now, LEAF, GROUP)
    said = {
        await read_back(tmp_path, swapped(now, one, other)) for one, other in pairwise(leaves)
    } - {sound}
    assert any("comes after" in answer for answer in said), said
    assert all("restore a backup" in answer for answer in said), said


async def test_values_in_each_others_place_are_found_out_when_they_are_read(tmp_path: Path) -> None:
    _, now = await stored(tmp_path)
    one, other, *_ = pages(now, OVERFLOW, b"once upon")
    (tmp_path / "data.mdb").write_bytes(swapped(now, one, other))
    actors = Actors(await TransferQueue.open(DiskStore(tmp_path)))
    actors.version = (await actors.queue.run_state("run")).published
    before = await actors.queue.ledger("run")
    leased = 0
    for stage in ("rollout", "reward"):
        with contextlib.suppress(WaitTimeoutError):
            lease = await actors.queue.lease(
                ["run"], stage, worker="w", limit=99, version=actors.version, wait_s=0
            )
            leased += sum(len(group.indices) for group in lease.groups)
    letters = await actors.queue.dead_letters("run")
    assert letters and leased, "the damaged rows leave, the others reach their workers"
    for letter in letters:
        assert re.search(
            r"damaged in the store: .*(do not match their checksum|the store returns)",
            letter.reason,
        )
    after = await actors.queue.ledger("run")
    assert after.balanced and after.admitted == before.admitted
    await actors.queue.close()


@pytest.mark.parametrize("bit", [18, 20, 24, 31])
async def test_a_value_whose_length_is_wrong_ends_no_process(tmp_path: Path, bit: int) -> None:
    """One bit of the length of a task of 6,800 bytes: LMDB would read far behind the file."""
    _, now = await stored(tmp_path)
    damaged = bytearray(now)
    leaves = [at + now[at : at + PAGE].rindex(TASK) for at in pages(now, LEAF, TASK)]
    assert leaves
    for key in leaves:
        # A node: its length, two bytes and two; flags; the key's length; the key.
        damaged[key - 8 + bit // 8] ^= 1 << bit % 8
    (tmp_path / "data.mdb").write_bytes(damaged)
    with pytest.raises(CorruptError, match=r"restore a backup") as raised:
        await TransferQueue.open(DiskStore(tmp_path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("whole", [False, True])
async def test_a_file_that_went_back_is_found_out(tmp_path: Path, whole: bool) -> None:
    """The newest of LMDB's two meta pages is lost; or all of the file is what it was before."""
    before, now = await stored(tmp_path)
    numbers = [int.from_bytes(now[at + 144 : at + 152], "little") for at in (0, PAGE)]
    newest = numbers.index(max(numbers)) * PAGE
    older = PAGE - newest
    gone = bytearray(now)
    gone[newest : newest + PAGE] = now[older : older + PAGE]
    why = "the last 1 commits are not in it"
    await refused(tmp_path, before if whole else bytes(gone), why)


async def test_a_store_whose_tables_are_gone_is_no_fresh_one(tmp_path: Path) -> None:
    await stored(tmp_path / "kept")
    lmdb.open(str(tmp_path / "empty"), max_dbs=2).close()
    await refused(tmp_path / "kept", (tmp_path / "empty" / "data.mdb").read_bytes(), "no readable")


async def test_a_folder_that_was_copied_as_it_was_opens(tmp_path: Path) -> None:
    await stored(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    (tmp_path / "two" / "commits").unlink()
    await (await TransferQueue.open(DiskStore(tmp_path / "two"))).close()


async def test_records_that_are_put_again_and_deleted_add_up(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, grow_bytes=1 << 20)
    await store.load()
    for turn in range(6):
        keys = {b"k%d" % number: bytes([turn]) * 60_000 for number in range(turn, turn + 9)}
        gone = [b"none", *([b"k%d" % (turn - 1)] if turn % 2 else [])]
        await store.apply(
            [Operation(table, key, value) for table in Table for key, value in keys.items()]
            + [Operation(table, key, None) for table in Table for key in gone]
        )
        await store.load()
    await store.close()
