"""The NCCL process: `python -m meshrl.weights.nccl.worker`, started by `process.NcclProcess` only.

Answers one frame after the other on an inherited socket, and moves bytes from and to the parent's memory. It ends
when the socket does, when its parent dies (the kernel sees to that), and after its first failure: it aborts, reports
the error, and exits without running any destructor. Blocked inside NCCL it cannot do this, and is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import queue
import signal
import socket
import threading
import time
from typing import NoReturn

from meshrl.common.process_guard import die_with_supervisor
from meshrl.contract.errors import InfraError, MeshError, UnavailableError
from meshrl.weights.nccl.library import Buffer, Communicator, Host, Library, load_library
from meshrl.weights.nccl.messages import Frame, pack, receive

_LEAVE_S = 1.0
_FIRST_LOOK_S, _LAST_LOOK_S = 20e-6, 1e-3


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


class Rank:
    """Joins, then takes part in one broadcast after the other; call `abort` before the process ends."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._hosts: dict[int, Host] = {}
        self._buffer: Buffer | None = None
        self._buffer_bytes = 0
        self._communicator: Communicator | None = None
        self._rank = 0

    def join(self, size: int, unique_id: bytes, rank: int, deadline_s: float) -> str:
        """Join the other ranks and warm up; the GPU whose memory may be lent, see `Library.gpu`.

        Only the warm-up has this deadline: joining itself cannot have one.
        """
        self._rank = rank
        self._communicator = self._library.join(size, unique_id, rank)
        self._communicator.warm_up()
        self._finish(self._communicator, deadline_s, "the warm-up")
        return self._library.gpu()

    def attach(self, number: int, descriptor: int, nbytes: int) -> None:
        """Map a file of the parent's that is `nbytes` long, and pin it."""
        try:
            self._hosts[number] = self._library.host(mmap.mmap(descriptor, nbytes))
        finally:
            os.close(descriptor)

    def detach(self, number: int) -> None:
        """Forget memory that the parent has freed."""
        self._hosts.pop(number).close()

    def reach(self, handle: str, nbytes: int) -> str:
        """Open memory that another process has lent, and close it; why that cannot be, or nothing."""
        try:
            self._library.lent(bytes.fromhex(handle), nbytes).close()
        except RuntimeError as error:
            return str(error) or repr(error)
        return ""

    def receive(self, handle: str, nbytes: int, root: int, deadline_s: float) -> str:
        """Take part in a broadcast into memory that another process has lent; the digest of what lies there then.

        It is open for that long only: afterwards its owner may do with it what it likes.
        """
        if self._communicator is None:
            raise InfraError("a broadcast needs a communicator")
        buffer = self._library.lent(bytes.fromhex(handle), nbytes)
        self._communicator.broadcast(buffer, nbytes, root)
        self._finish(self._communicator, deadline_s, f"a broadcast of {nbytes} bytes")
        digest = self._library.digest(buffer, nbytes)
        buffer.close()
        return digest

    def broadcast(self, number: int, at: int, nbytes: int, root: int, deadline_s: float) -> None:
        """Shared memory to device at the root, device to all devices, device to shared memory at the others.

        Raises:
            UnavailableError: not through within the deadline.
        """
        communicator, host = self._communicator, self._hosts.get(number)
        if communicator is None or host is None:
            raise InfraError("a broadcast needs a communicator and memory")
        buffer = self._device_memory(nbytes)
        if self._rank == root:
            buffer.load(host, at, nbytes)
        communicator.broadcast(buffer, nbytes, root)
        if self._rank != root:
            buffer.store(host, at, nbytes)
        self._finish(communicator, deadline_s, f"a broadcast of {nbytes} bytes")

    def abort(self) -> None:
        """Abort the communicator; idempotent."""
        if self._communicator is not None:
            self._communicator.abort()

    def _device_memory(self, nbytes: int) -> Buffer:
        """The device buffer through which every bucket goes."""
        if self._buffer is None or self._buffer_bytes < nbytes:
            if self._buffer is not None:
                self._buffer.close()
            self._buffer, self._buffer_bytes = self._library.buffer(nbytes), nbytes
        return self._buffer

    def _finish(self, communicator: Communicator, deadline_s: float, what: str) -> None:
        """Wait until the device has finished, NCCL reports an error, or the deadline passes.

        Polls instead of calling cudaEventSynchronize, which returns neither at a deadline nor when another rank dies;
        CUDA has no wait that does.
        """
        passed = self._library.mark()
        ends = time.monotonic() + deadline_s
        look_s = _FIRST_LOOK_S
        while not passed():
            communicator.check()
            if time.monotonic() > ends:
                raise UnavailableError(f"{what} did not finish in {deadline_s:.1f} s")
            time.sleep(look_s)
            look_s = min(2 * look_s, _LAST_LOOK_S)


if __name__ == "__main__":
    main()
