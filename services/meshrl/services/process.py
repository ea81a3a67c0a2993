"""How a service's process treats its memory: Python's collector, and the allocator under it."""

from __future__ import annotations

import ctypes
import gc
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_MMAP_BYTES: Final = 32 << 20
"""The most that glibc takes."""
_KEPT_BYTES: Final = 256 << 20
_GROWTH_BYTES: Final = 16 << 20


def collect_rarely() -> None:
    """For a process that holds many objects and makes few cycles, such as the queue's.

    Python's collector walks all of them again and again, to find nothing: a tenth of the time under load, and pauses
    that grow with what is resident.
    """
    gc.set_threshold(200_000, 50, 1_000)


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
    half of what gRPC costs per byte. Up to 256 MiB of free memory stay here. Another libc is left alone.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_M_TOP_PAD, _GROWTH_BYTES)
