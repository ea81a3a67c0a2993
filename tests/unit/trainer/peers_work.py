"""Two machines of one rank each, of which one is stopped, replaced, or comes to the end."""

from __future__ import annotations

import os
import signal
import time

import torch.distributed as dist

from meshrl.contract.errors import InfraError
from meshrl.trainer.ranks.peers import Peers, Seat, came

SILENT_S = 1.0


def _started(rank: int, port: int, silent_s: float) -> tuple[object, Peers]:
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]
    seat = Seat(rank, rank, 2, True)
    assert came(store, seat)
    return store, Peers(store, seat, silent_s)


def _first(silent_s: float, work: str) -> tuple[int, int]:
    """A fork that is rank 0; its process id and port."""
    read, write = os.pipe()
    if pid := os.fork():
        return pid, int(os.read(read, 16))
    store, peers = _started(0, 0, silent_s)
    os.write(write, str(store.port).encode())  # type: ignore[attr-defined]
    if work == "finish":
        time.sleep(1.0)
        peers.finish()
        print("together to the end", flush=True)
        os._exit(0)
    time.sleep(60 if work == "wait" else 1.0)
    os._exit(3)


def _second(port: int, silent_s: float) -> int:
    if pid := os.fork():
        return pid
    _, peers = _started(1, port, silent_s)
    try:
        peers.until_finished()
        print("together to the end", flush=True)
    except InfraError as error:
        print(error, flush=True)
    os._exit(0)


def _code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    os.dup2(1, 2)
    first, port = _first(SILENT_S, "wait")
    second = _second(port, SILENT_S)
    time.sleep(0.5)
    os.kill(second, signal.SIGSTOP)
    assert _code(first) == 1
    os.kill(second, signal.SIGKILL)
    _code(second)

    first, port = _first(6.0, "wait")
    second = _second(port, 60.0)
    time.sleep(1.0)
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)  # type: ignore[attr-defined]
    assert not came(store, Seat(1, 1, 2, True))
    assert _code(first) == 1 and _code(second) == 0

    first, port = _first(60.0, "end")
    second = _second(port, 60.0)
    assert _code(first) == 3 and _code(second) == 0

    first, port = _first(60.0, "finish")
    second = _second(port, 60.0)
    assert _code(first) == 0 and _code(second) == 0
