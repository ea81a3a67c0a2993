"""Lent memory: both directions, reuse, refusals."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.contract.codec.arena import Arena, Lent, Offer, Region, Slot, sweep
from meshrl.contract.errors import CapacityError, CorruptError, UserError
from meshrl.contract.frames import pack


def frame(number: int, length: int = 100) -> bytes:
    return pack([{"tokens": np.full(length, number, np.int32)}])


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(1 << 16) as arena:
        yield arena


@pytest.fixture
def lent(arena: Arena) -> Iterator[Lent]:
    accepted = Lent.accept(arena.offer)
    assert accepted is not None
    yield accepted[0]
    accepted[0].close()


def test_what_was_put_is_taken_in_one_piece(arena: Arena, lent: Lent) -> None:
    parts = [[frame(number), memoryview(frame(-number))] for number in range(5)]
    slots = [arena.put(each) for each in parts]
    assert [lent.take(slot) for slot in slots if slot] == [b"".join(each) for each in parts]


def test_what_was_given_is_taken_and_what_does_not_fit_is_refused(arena: Arena, lent: Lent) -> None:
    region = arena.reserve(3000)
    assert region is not None
    left = region
    for number in (1, 3):
        given = lent.give(left, [frame(number)])
        assert given is not None
        slot, left = given
        assert arena.take(slot) == frame(number)
        assert lent.give(left, [frame(2, 10_000)]) is None
    assert left.offset + left.size == region.offset + region.size


def test_more_parts_than_one_call_takes(lent: Lent, arena: Arena) -> None:
    parts = [bytes([number % 251]) for number in range(5000)]
    slot = arena.put(parts)
    assert slot is not None
    assert lent.take(slot) == b"".join(parts)


def test_a_slot_that_was_reused_is_corrupt_and_never_anothers_bytes(
    arena: Arena, lent: Lent
) -> None:
    old = arena.put([frame(1)])
    assert old is not None
    arena.free(old)
    new = arena.put([frame(2)])
    assert new is not None
    assert (new.offset, new.size) == (old.offset, old.size)
    for read in (lent.take, arena.take):
        with pytest.raises(CorruptError, match="other bytes"):
            read(old)
    assert lent.take(new) == frame(2)


def test_a_full_arena_says_none_until_something_is_freed(arena: Arena) -> None:
    slots = []
    while (slot := arena.put([frame(0, 1000)])) is not None:
        slots.append(slot)
    assert len(slots) > 10
    arena.free(slots[3])
    arena.free(slots[3])
    assert arena.put([frame(0, 1000)]) == slots[3]
    assert arena.put([frame(0, 1000)]) is None


def test_what_was_abandoned_is_never_given_again(arena: Arena) -> None:
    region = arena.reserve(1000)
    assert region is not None
    arena.abandon(region)
    arena.free(region)
    assert arena.lost_bytes == region.size
    while (slot := arena.reserve(64)) is not None:
        assert slot.offset >= region.offset + region.size or slot.offset < region.offset


@given(st.lists(st.tuples(st.integers(1, 9000), st.booleans()), max_size=60))
def test_regions_never_overlap_and_all_memory_comes_back(steps: list[tuple[int, bool]]) -> None:
    with Arena.create(1 << 16) as arena:
        held: list[Region] = []
        for size, free_one in steps:
            if free_one and held:
                arena.free(held.pop(size % len(held)))
            elif (region := arena.reserve(size)) is not None:
                held.append(region)
            ends = sorted((r.offset, r.offset + r.size) for r in held)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
        for region in held:
            arena.free(region)
        assert arena.reserve(1 << 16) is not None


def test_only_the_file_itself_proves_the_same_host(arena: Arena, tmp_path: Path) -> None:
    accepted = Lent.accept(arena.offer)
    assert accepted is not None
    lent, proof = accepted
    lent.close()
    assert arena.is_proved_by(proof)
    # The same name in another /dev/shm, as a container has.
    (tmp_path / arena.offer.name).write_bytes(bytes(1 << 16))
    elsewhere = Lent.accept(arena.offer, tmp_path)
    assert elsewhere is not None
    assert not arena.is_proved_by(elsewhere[1])
    elsewhere[0].close()
    assert Lent.accept(Offer("another boot", arena.offer.name)) is None
    assert Lent.accept(Offer(arena.offer.boot_id, f"meshrl-{'0' * 16}.arena")) is None


@pytest.mark.parametrize("name", ["../etc/passwd", "meshrl-x.arena", "/dev/shm/x", ""])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="no name of an arena"):
        Lent.accept(Offer("x", name))


@pytest.mark.parametrize(
    "slot",
    [Slot(0, 64, 0), Slot(64, 1 << 40, 1), Slot(1 << 40, 64, 1), Slot(64, 3, 0), Slot(-1, 9, 0)],
)
def test_a_slot_outside_is_corrupt(arena: Arena, lent: Lent, slot: Slot) -> None:
    for read in (lent.take, arena.take):
        with pytest.raises(CorruptError):
            read(slot)


@pytest.mark.parametrize("region", [Region(0, 64), Region(64, 1 << 40), Region(64, -1)])
def test_a_region_outside_is_corrupt(lent: Lent, region: Region) -> None:
    with pytest.raises(CorruptError, match="outside"):
        lent.give(region, [frame(1)])


def test_a_file_that_shrank_is_corrupt_and_kills_nobody(arena: Arena, lent: Lent) -> None:
    slot = arena.put([frame(1)])
    assert slot is not None
    os.truncate(f"/dev/shm/{arena.offer.name}", 100)
    for read in (lent.take, arena.take):
        with pytest.raises(CorruptError):
            read(slot)


def test_no_room_is_a_capacity_error_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="no room"):
        Arena.create(1 << 50, tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CapacityError, match="no shared memory"):
        Arena.create(1 << 16, tmp_path / "nowhere")


def test_a_closed_arena_leaves_no_file_and_what_was_copied_out_lives_on() -> None:
    arena = Arena.create(1 << 16)
    slot = arena.put([frame(7)])
    assert slot is not None
    copied = arena.take(slot)
    name = arena.offer.name
    arena.close()
    arena.close()
    assert not Path("/dev/shm", name).exists()
    assert copied == frame(7)
    assert name not in sweep()
