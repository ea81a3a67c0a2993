"""One connection of a local socket, at either end: whole frames in and out, each of bounded size and time."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from enum import IntEnum
from typing import Final, TypeAlias, cast

import grpc
import numpy as np

from meshrl.contract.errors import CapacityError
from meshrl.rpc.transport import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES

Part: TypeAlias = bytes | memoryview
_PREFIX: Final = struct.Struct("<II")
_PEER: Final = struct.Struct("3i")
AHEAD_BYTES: Final = 1 << 14
"""A read of small frames; bytes of a larger one that are there already are copied once."""
SEND_BYTES: Final = 1 << 20
"""A page of payload; the kernel grants what its limit allows (net.core.wmem_max)."""
STALLED_S: Final = 30.0
"""Seconds for which a frame that has begun may stand still: as long as gRPC's keepalive waits for a silent peer."""


class Kind(IntEnum):
    """What a frame is."""

    HEAD = 1
    """A CallHead: a call begins."""
    MESSAGE = 2
    """Of a request or an answer."""
    END = 3
    """A CallEnd: of a request (empty) or of an answer."""
    REFERRING = 4
    """A message, some of whose frames lie in shared memory (shared_memory.py)."""


_MOST_BYTES: Final = {
    Kind.HEAD: MAX_METADATA_BYTES,
    Kind.MESSAGE: MAX_MESSAGE_BYTES,
    Kind.END: MAX_METADATA_BYTES,
    Kind.REFERRING: MAX_MESSAGE_BYTES,
}


class WireError(grpc.aio.BaseError):
    """The other side went away, stood still in the middle of a frame, or sent what is no frame: no handler failed."""


class Wire(asyncio.BufferedProtocol):
    """Messages go from the kernel into memory of their own, and from the memory of the sender into the kernel."""

    _transport: asyncio.Transport

    def __init__(self, name: str = "") -> None:
        self.name = name
        """Of the socket."""
        self.has_served = False
        """A call has come to its end."""
        self.on_lost: Callable[[], object] = lambda: None
        """Called when the connection has ended, whoever ended it."""
        self.lost = True
        """Until it is made, and from its end on."""
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        """What was read before somebody asked for it: a connection is always read, so that its end is noticed."""
        self._start = self._end = 0
        self._view: memoryview | None = None
        """What somebody waits for, the part that is not there yet."""
        self._filled: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None

    async def receive(self, *, begun: bool = False) -> tuple[Kind, memoryview]:
        """The next frame, read-only. It may take any time to come, unless a request has `begun`. Raises WireError."""
        prefix = memoryview(bytearray(_PREFIX.size))
        await (self._in_time(self._fill(prefix)) if begun else self._fill(prefix))
        number, size = _PREFIX.unpack(prefix)
        if size > _MOST_BYTES.get(number, -1):
            raise self._broken(f"a frame of kind {number} with {size} bytes")
        body = np.empty(size, np.uint8).data  # unlike a bytearray, not filled with zeros first
        await self._in_time(self._fill(body))
        return Kind(number), body.toreadonly()

    async def send(self, kind: Kind, parts: Sequence[Part] = ()) -> None:
        """Send a frame, whose parts may not change; most of it has left then. Raises WireError, CapacityError."""
        size, limit = sum(map(len, parts)), _MOST_BYTES[kind]
        if size > limit:  # the other side would hang up without a word of why
            what = f"a message of {size} bytes by the local socket is larger than {limit}"
            raise CapacityError(what, size=size, limit=limit)
        if self.lost:
            raise WireError("the connection is closed")
        self._transport.writelines((_PREFIX.pack(kind, size), *parts))
        if self._drained is not None:
            await self._in_time(self._drained)

    def close(self) -> None:
        """End the connection at once. Idempotent."""
        if not self.lost:
            self.lost = True
            self._transport.abort()

    async def _fill(self, view: memoryview) -> None:
        here = min(len(view), self._end - self._start)
        view[:here] = self._ahead[self._start : self._start + here]
        self._start += here
        if here == len(view):
            return
        if self.lost:
            raise WireError("the connection is closed")
        self._start = self._end = 0
        self._view = view[here:]
        self._filled = asyncio.get_running_loop().create_future()
        self._transport.resume_reading()
        try:
            await self._filled
        finally:
            self._view = None

    async def _in_time(self, progress: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(STALLED_S):
                await progress
        except TimeoutError:
            raise self._broken(f"a frame stood still for {STALLED_S:.0f} s") from None

    def _broken(self, why: str) -> WireError:
        self.close()
        return WireError(why)

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.BaseProtocol."""
        self._transport = cast(asyncio.Transport, transport)
        self.lost = False
        sending = transport.get_extra_info("socket")
        sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio.BufferedProtocol."""
        if self._view is not None:
            return self._view
        if self._end == len(self._ahead):  # uvloop may read once more after it was told to pause
            self._ahead = memoryview(bytearray(bytes(self._ahead) + bytes(AHEAD_BYTES)))
        return self._ahead[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio.BufferedProtocol."""
        if self._view is None:
            self._end += nbytes
            if self._end == len(self._ahead):
                self._transport.pause_reading()
            return
        self._view = self._view[nbytes:]
        if not self._view:
            self._view = None
            wake(self._filled)

    def pause_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        wake(self._drained)
        self._drained = None

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.BaseProtocol."""
        self.lost = True
        for waiting in (self._filled, self._drained):
            if waiting is not None and not waiting.done():
                waiting.set_exception(WireError("the other side closed the connection"))
        self.on_lost()


def wake(waiting: asyncio.Future[None] | None) -> None:
    """End a wait, once."""
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


def is_own(connection: socket.socket) -> bool:
    """True if the process at the other end is of the same user. Both ends ask."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    user: int = _PEER.unpack(peer)[1]
    return user == os.getuid()
