"""Memory for the buckets of a version that other processes can map, reused for the next version.

One file without a name holds one version. It is given back when nothing refers to its arrays any more, and kept for
the next one, so that what pinned or mapped it once need not do so again.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshrl.contract.types import Uint8

_ALIGNED = 4096
_numbers = itertools.count(1)
_lock = threading.RLock()  # arrays may die anywhere, in `allocate` too

Pin = Callable[[int, int], Callable[[], object]]
"""Page-locks memory by address and size in bytes; returns a function that undoes it."""


def page_lock(runtime: Any) -> Pin:
    """A `Pin` by CUDA's runtime, `torch.cuda.cudart()`. It raises OSError where CUDA refuses."""

    def pin(address: int, nbytes: int) -> Callable[[], object]:
        status = int(runtime.cudaHostRegister(address, nbytes, 0))
        if status:
            raise OSError(f"CUDA locks no {nbytes} bytes of memory: error {status}")
        return lambda: runtime.cudaHostUnregister(address)

    return pin


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """The memory of one version."""

    number: int
    """The buffer's number, unique in a process."""
    descriptor: int
    nbytes: int
    address: int
    memory: mmap.mmap
    unpin: Callable[[], object] | None


_live: dict[int, Region] = {}
_free: list[Region] = []


def allocate(sizes: Sequence[int], pin: Pin | None = None) -> list[Uint8]:
    """An array uint8[n] for each size, with anything in it. Raises OSError where there is no memory."""
    starts = list(itertools.accumulate((-(-n // _ALIGNED) * _ALIGNED for n in sizes), initial=0))
    region = _take(max(_ALIGNED, starts[-1]), pin)
    whole: Uint8 = np.frombuffer(region.memory, dtype=np.uint8)
    weakref.finalize(whole, _give_back, region.number).atexit = False
    return [whole[at : at + n] for at, n in zip(starts, sizes, strict=False)]


def find(array: Uint8) -> tuple[Region, int] | None:
    """The region that an array of `allocate` lies in, and where; None for other memory."""
    address = array.__array_interface__["data"][0]
    with _lock:
        for region in list(_live.values()):  # arrays that die meanwhile change it
            if region.address <= address < region.address + region.nbytes:
                return region, address - region.address
    return None


def exists(number: int) -> bool:
    """Whether the region is there, in use or kept."""
    with _lock:
        return number in _live or any(region.number == number for region in _free)


def _take(nbytes: int, pin: Pin | None) -> Region:
    with _lock:
        fits = [
            region
            for region in _free
            if nbytes <= region.nbytes <= 2 * nbytes and bool(region.unpin) == bool(pin)
        ]
        if fits:
            region = min(fits, key=lambda each: each.nbytes)
            _free.remove(region)
        else:
            region = _make(nbytes, pin)
        _live[region.number] = region
        return region


def _make(nbytes: int, pin: Pin | None) -> Region:
    descriptor = os.memfd_create("meshrl-version")
    try:
        os.ftruncate(descriptor, nbytes)
        memory = mmap.mmap(descriptor, nbytes)
        address = np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0]
        unpin = pin(address, nbytes) if pin else None
    except OSError:
        os.close(descriptor)
        raise
    return Region(next(_numbers), descriptor, nbytes, address, memory, unpin)


def _give_back(number: int) -> None:
    """Keep a buffer that no array refers to.

    No more bytes are kept than are in use, or one buffer: a page-locked one, which took long to make, or the largest.
    """
    with _lock:
        _free.append(_live.pop(number))
        used = sum(region.nbytes for region in list(_live.values()))
        while len(_free) > 1 and sum(region.nbytes for region in _free) > used:
            least = min(_free, key=lambda region: (region.unpin is not None, region.nbytes))
            _free.remove(least)
            if least.unpin is not None:
                least.unpin()
            os.close(least.descriptor)  # the mapping ends with `memory`
