"""Memory of versions: mapped by others, taken again, never while somebody still has it."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from meshrl.common import shared_buffers


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The files here, without those of earlier tests, none of which dies meanwhile."""
    gc.collect()
    gc.disable()
    monkeypatch.setattr(shared_buffers, "_free", [])
    monkeypatch.setattr(shared_buffers, "_live", {})
    yield
    gc.enable()


def test_whoever_maps_the_file_sees_what_the_arrays_hold() -> None:
    one, two = shared_buffers.allocate([5000, 7])
    one[:], two[:] = 1, 2
    found = shared_buffers.find(two)
    assert found is not None
    region, at = found
    with mmap.mmap(region.descriptor, region.nbytes) as theirs:
        assert theirs[at : at + 7] == b"\2" * 7
        assert theirs[:5000] == b"\1" * 5000
        theirs[at] = 9
    assert two[0] == 9
    assert at % 4096 == 0
    assert shared_buffers.find(np.zeros(7, np.uint8)) is None


def test_memory_is_taken_again_once_no_array_of_it_is_left() -> None:
    pinned: list[str] = []

    def pin(address: int, nbytes: int) -> object:
        pinned.append("pinned")
        return lambda: pinned.append("unpinned")

    def number(array: np.ndarray) -> int:
        found = shared_buffers.find(array)
        assert found is not None
        return found[0].number

    first, part = shared_buffers.allocate([8192, 4096], pin)  # type: ignore[arg-type]
    one = number(first)
    part = part[10:20]
    del first
    (other,) = shared_buffers.allocate([12288], pin)  # type: ignore[arg-type]
    assert number(other) != one  # a view of it is left
    del part
    (again,) = shared_buffers.allocate([12288], pin)  # type: ignore[arg-type]
    assert number(again) == one
    assert pinned == ["pinned", "pinned"]
    del other, again  # two are free, none in use: one is kept
    assert pinned == ["pinned", "pinned", "unpinned"]
    assert shared_buffers.exists(one) + len(shared_buffers._free) in (1, 2)
    (small,) = shared_buffers.allocate([4096])
    assert number(small) != one  # it would waste most of it
    del small
    assert [region.nbytes for region in shared_buffers._free] == [12288]


class Runtime:
    """CUDA's, as torch has it."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.locked: set[int] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.locked.add(address)
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.locked.remove(address)
        return 0


def test_memory_is_page_locked_for_as_long_as_it_is_kept() -> None:
    runtime = Runtime(status=0)
    first, second = (
        shared_buffers.allocate([12288], shared_buffers.page_lock(runtime))[0] for _ in range(2)
    )
    assert runtime.locked == {each.__array_interface__["data"][0] for each in (first, second)}
    del first, second
    assert len(runtime.locked) == 1  # kept for the next version


def test_memory_that_was_kept_without_a_lock_serves_nobody_who_wants_one() -> None:
    shared_buffers.allocate([12288])  # given back at once
    runtime = Runtime(status=0)
    (array,) = shared_buffers.allocate([12288], shared_buffers.page_lock(runtime))
    assert runtime.locked == {array.__array_interface__["data"][0]}


def test_memory_without_a_lock_neither_takes_nor_displaces_page_locked_memory() -> None:
    pin = shared_buffers.page_lock(Runtime(status=0))
    (locked,) = shared_buffers.allocate([12288], pin)
    (plain,) = shared_buffers.allocate([12288])
    region = shared_buffers.find(locked)
    del locked, plain  # one is kept
    (plain,) = shared_buffers.allocate([12288])
    (again,) = shared_buffers.allocate([12288], pin)
    assert shared_buffers.find(again) == region
    assert plain is not again


def test_memory_that_cuda_does_not_lock_is_given_back() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="CUDA locks no 12288 bytes of memory: error 2"):
        shared_buffers.allocate([12288], shared_buffers.page_lock(Runtime(status=2)))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
