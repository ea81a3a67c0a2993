"""Memory settings of a service's process: Python's garbage collector and glibc's malloc."""

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
"""The largest value that glibc accepts."""
_FREE_BYTES: Final = 256 << 20
_GROWTH_BYTES: Final = 16 << 20
_ARENAS: Final = 2


def collect_garbage_rarely() -> None:
    """Make full garbage collections rare. For processes with many objects and few cycles, such as the queue's.

    By default Python's collector walks all objects again and again and finds nothing: a tenth of the time under load,
    and pauses that grow with the number of resident rows. Young objects are still collected often, because gRPC
    leaves a cycle of five objects behind for each call (`_find_method_handler`): 200,000 of them before a collection
    would be 40 MB. No collection walks more than the youngest 200,000 objects.
    """
    gc.set_threshold(10_000, 20, 100_000)


def freeze_startup_objects() -> None:
    """Exclude the objects that exist now from garbage collection. Call it after the imports.

    With torch and transformers imported that is a million objects; a busy event loop spent a third of its time on
    walking them.
    """
    gc.collect()
    gc.freeze()


def reuse_freed_memory() -> None:
    """Let malloc reuse freed blocks of about a mebibyte. For processes that carry messages of that size.

    By default glibc returns such blocks to the kernel at once, and the kernel hands them out again zeroed, page by
    page: half of gRPC's cost per byte. With this setting up to 256 MiB of free memory stay in the process until
    protobuf returns them: it calls malloc_trim with every 10,000th block that its messages free, about once a second
    in a queue at full rate. With another libc this does nothing.
    """
    _mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
    _mallopt(_M_TRIM_THRESHOLD, _FREE_BYTES)
    _mallopt(_M_TOP_PAD, _GROWTH_BYTES)


def limit_malloc_arenas() -> None:
    """Let threads share two malloc arenas. For processes whose threads pass memory on, such as the queue's.

    By default glibc gives each thread its own arena, and memory freed in one is not used by another: each gRPC thread
    that carried a message made the queue's process grow by some megabytes, 20 in all. Two arenas cost no more
    processor time. Only threads that start later share them.
    """
    _mallopt(_M_ARENA_MAX, _ARENAS)


def _mallopt(option: int, value: int) -> None:
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(option, value)
