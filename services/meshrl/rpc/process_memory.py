"""How a service's process treats its memory: Python's collector, and the allocator under it."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_MMAP_BYTES: Final = 32 << 20
"""The most that glibc takes."""
_KEPT_BYTES: Final = 256 << 20
_GROWTH_BYTES: Final = 16 << 20
_HEAPS: Final = 2


def collect_rarely() -> None:
    """For a process that holds many objects and makes few cycles, such as the queue's.

    Python's collector walks all of them again and again, to find nothing: a tenth of the time under load, and pauses
    that grow with what is resident. The youngest are walked often all the same: gRPC leaves a cycle of five objects
    behind for each call (`_find_method_handler`), so 200,000 before a collection would be 40 MB. No walk is of more
    than the youngest 200,000.
    """
    gc.set_threshold(10_000, 20, 100_000)


def set_aside_start() -> None:
    """What a start leaves behind stays: Python's collector need not walk it again and again.

    With torch and transformers imported that is a million objects; a busy event loop spent a third of its time on
    them.
    """
    gc.collect()
    gc.freeze()


def keep_memory() -> None:
    """For a process through which messages of about a mebibyte go: freed memory is used again.

    glibc gives such blocks back to the kernel at once, which hands them out anew zeroed and page by page: that is
    half of what gRPC costs per byte. Up to 256 MiB of free memory stay here, until protobuf gives them back: it calls
    malloc_trim with every 10,000th block that its messages free, about once a second in a queue at full rate. Another
    libc is left alone.
    """
    _mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
    _mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    _mallopt(_M_TOP_PAD, _GROWTH_BYTES)


def share_heaps() -> None:
    """For a process whose threads hand memory to one another and seldom ask for it at once, such as the queue's.

    glibc gives each thread a heap of its own, and what is freed in one no other can use: with every thread of gRPC's
    that happened to carry a message the queue's process grew by some megabytes, 20 in all. Two heaps cost no more
    processor time. Only threads that begin later share them.
    """
    _mallopt(_M_ARENA_MAX, _HEAPS)


def _mallopt(option: int, value: int) -> None:
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(option, value)
