"""Memory settings of a service's process: garbage cycles stay few, and threads share two malloc arenas."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from meshrl.rpc.process_memory import collect_garbage_rarely

ARENAS = """
import ctypes, threading
from meshrl.rpc.process_memory import limit_malloc_arenas

limit_malloc_arenas()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
threads = 8
together = threading.Barrier(threads)

def use() -> None:
    together.wait()
    blocks = [bytearray(5_000) for _ in range(100)]
    together.wait()

workers = [threading.Thread(target=use) for _ in range(threads)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""


class Cycle:
    """A small copy of the cycle that gRPC leaves behind for each call."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("thresholds")
def test_cycles_of_calls_do_not_accumulate() -> None:
    collect_garbage_rarely()
    for _ in range(40_000):
        Cycle()
    # Compares types, because isinstance on other libraries' objects may raise their warnings.
    assert sum(type(each) is Cycle for each in gc.get_objects()) <= 10_001


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="another libc")
def test_threads_share_two_arenas() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ARENAS], capture_output=True, text=True, timeout=120, check=True
    )
    assert 1 <= ran.stdout.count("<heap nr=") <= 2
