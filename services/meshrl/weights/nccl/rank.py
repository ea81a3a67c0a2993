"""One rank of one communicator, in a NCCL process, with a deadline for every call that can have one."""

from __future__ import annotations

import mmap
import os
import time

from meshrl.contract.errors import InfraError, UnavailableError
from meshrl.weights.nccl.library import Buffer, Communicator, Host, Library

_FIRST_LOOK_S, _LAST_LOOK_S = 20e-6, 1e-3


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
        """The parent has freed it."""
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
        """What every bucket goes through."""
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
                raise UnavailableError(f"{what} was not through in {deadline_s:.1f} s")
            time.sleep(look_s)
            look_s = min(2 * look_s, _LAST_LOOK_S)
