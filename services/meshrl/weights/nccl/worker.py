"""The NCCL process: `python -m meshrl.weights.nccl.worker`, started by `process.NcclProcess` only.

Answers one frame after the other on an inherited socket, and moves bytes through inherited shared memory. It ends
when the socket does, when its parent dies (the kernel sees to that), and after its first failure: it aborts, says
what went wrong, and exits without running any destructor. Blocked inside NCCL it does none of this, and is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
import socket
import threading
from typing import NoReturn

from meshrl.contract.errors import InfraError, MeshError, UnavailableError
from meshrl.rpc.parent_death import die_with_parent
from meshrl.weights.nccl.library import load_library
from meshrl.weights.nccl.messages import Frame, pack, receive
from meshrl.weights.nccl.rank import Rank

_LEAVE_S = 1.0


def main() -> NoReturn:
    """Serve until the parent hangs up."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to answer
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--memory", type=int, required=True)
    parser.add_argument("--library", required=True)
    parser.add_argument("--device", type=int, required=True)
    args = parser.parse_args()
    connection = socket.socket(fileno=args.socket)
    inbox: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, inbox), daemon=True).start()
    code = _serve(args, connection, inbox)
    os._exit(code)


def _serve(
    args: argparse.Namespace, connection: socket.socket, inbox: queue.SimpleQueue[Frame | None]
) -> int:
    rank: Rank | None = None
    try:
        library = load_library(args.library, args.device)
        rank = Rank(library, args.memory)
        connection.sendall(pack({"library": args.library, "version": library.version}))
        while (frame := inbox.get()) is not None:
            answer: Frame = {}
            match frame.pop("do"):
                case "unique_id":
                    answer["unique_id"] = library.unique_id().hex()
                case "join":
                    rank.join(unique_id=bytes.fromhex(frame.pop("unique_id")), **frame)
                case "remember":
                    rank.remember(**frame)
                case "broadcast":
                    rank.broadcast(**frame)
            connection.sendall(pack(answer))
        rank.abort()
    except Exception as error:  # whatever cupy, NCCL or CUDA raise: told to the parent, and the end
        failure = _in_our_words(error)
        with contextlib.suppress(Exception):  # the first failure is the one to tell
            if rank is not None:
                rank.abort()
        with contextlib.suppress(OSError):  # the parent is gone, and this process with it
            connection.sendall(pack({"code": failure.code, "failed": str(failure)}))
        return 1
    return 0


def _in_our_words(error: Exception) -> MeshError:
    if isinstance(error, MeshError):
        return error
    if isinstance(error, RuntimeError):  # NcclError, CUDARuntimeError
        return UnavailableError(str(error).splitlines()[0] if str(error) else repr(error))
    if isinstance(
        error, KeyError
    ):  # cupy has no word for some results of NCCL: 7 is ncclInProgress
        return UnavailableError(f"NCCL result {error}, which cupy does not know")
    return InfraError(repr(error))


def _listen(connection: socket.socket, inbox: queue.SimpleQueue[Frame | None]) -> None:
    """In a thread of its own, so that the end of the parent is noticed while the other one is inside NCCL."""
    try:
        while (frame := receive(connection)) is not None:
            inbox.put(frame)
    finally:
        inbox.put(None)
        threading.Event().wait(_LEAVE_S)
        os._exit(1)


if __name__ == "__main__":
    main()
