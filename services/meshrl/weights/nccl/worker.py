"""The NCCL process: `python -m meshrl.weights.nccl.worker`, started by `process.NcclProcess` only.

Answers one frame after the other on an inherited socket, and moves bytes from and to the parent's memory. It ends
when the socket does, when its parent dies (the kernel sees to that), and after its first failure: it aborts, reports
the error, and exits without running any destructor. Blocked inside NCCL it cannot do this, and is killed.
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

from meshrl.common.process_guard import die_with_supervisor
from meshrl.contract.errors import InfraError, MeshError, UnavailableError
from meshrl.weights.nccl.library import load_library
from meshrl.weights.nccl.messages import Frame, pack, receive
from meshrl.weights.nccl.rank import Rank

_LEAVE_S = 1.0


def main() -> NoReturn:
    """Serve until the parent closes the socket."""
    die_with_supervisor()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--memory", type=int, required=True, help="a socket that files come over")
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
        rank = Rank(library)
        files = socket.socket(fileno=args.memory)
        connection.sendall(pack({"library": args.library, "version": library.version}))
        while (frame := inbox.get()) is not None:
            answer: Frame = {}
            match frame.pop("do"):
                case "unique_id":
                    answer["unique_id"] = library.unique_id().hex()
                case "join":
                    unique_id = bytes.fromhex(frame.pop("unique_id"))
                    answer["gpu"] = rank.join(unique_id=unique_id, **frame)
                    answer["memory"] = library.memory
                case "reach":
                    answer["error"] = rank.reach(**frame)
                case "receive":
                    answer["digest"] = rank.receive(**frame)
                case "attach":
                    _, (descriptor, *_), _, _ = socket.recv_fds(files, 1, 1)
                    rank.attach(descriptor=descriptor, **frame)
                case "detach":
                    rank.detach(**frame)
                case "broadcast":
                    rank.broadcast(**frame)
            connection.sendall(pack(answer))
        rank.abort()
    except Exception as error:  # from cupy, NCCL or CUDA: reported to the parent, then exit
        failure = _as_mesh_error(error)
        with contextlib.suppress(Exception):  # only the first failure is reported
            if rank is not None:
                rank.abort()
        with contextlib.suppress(OSError):  # the parent is dead
            connection.sendall(pack({"code": failure.code, "failed": str(failure)}))
        return 1
    return 0


def _as_mesh_error(error: Exception) -> MeshError:
    if isinstance(error, MeshError):
        return error
    if isinstance(error, RuntimeError):  # NcclError, CUDARuntimeError
        return UnavailableError(str(error).splitlines()[0] if str(error) else repr(error))
    if isinstance(
        error, KeyError
    ):  # cupy has no name for some results of NCCL: 7 is ncclInProgress
        return UnavailableError(f"NCCL result {error}, which cupy does not know")
    return InfraError(repr(error))


def _listen(connection: socket.socket, inbox: queue.SimpleQueue[Frame | None]) -> None:
    """Runs in a thread of its own, to notice the parent's end while the main thread is inside NCCL."""
    try:
        while (frame := receive(connection)) is not None:
            inbox.put(frame)
    finally:
        inbox.put(None)
        threading.Event().wait(_LEAVE_S)
        os._exit(1)


if __name__ == "__main__":
    main()
