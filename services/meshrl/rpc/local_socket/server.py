"""The server's end: the calls of a local socket become calls of the handlers that gRPC has."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Final, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from meshrl.contract.codec.bulk import Bulk, Frame
from meshrl.contract.frames import Shared
from meshrl.rpc.errors import DETAIL_KEY
from meshrl.rpc.interceptors import Context, Handler, InterceptedHandlers, Parse, Serialize
from meshrl.rpc.local_socket.shared_memory import (
    LARGER,
    LEAST_BYTES,
    REGION_BYTES,
    Caller,
    SharedMemory,
    address_of_link,
    parsed,
    send_message,
)
from meshrl.rpc.local_socket.wire import Kind, Wire, WireError, is_own, wake
from meshrl.v1.local_socket_pb2 import CallEnd, CallHead

log = logging.getLogger(__name__)

Admit: TypeAlias = Callable[[socket.socket], Awaitable[None]]

MAX_CALLERS: Final = 4_096
"""Connections of one socket. The one too many is closed, and whoever made it goes on over gRPC."""
PAUSE_S: Final = 0.1
"""After a connection that could not be accepted."""


class LocalSocketServer:
    """Serves some methods of `handlers` to processes of this user on this machine. Linux only."""

    def __init__(
        self,
        handlers: InterceptedHandlers,
        methods: Collection[str],
        shared_bytes: int = 0,
    ) -> None:
        """`methods`: full names. `shared_bytes`: of memory for long frames. Nothing listens before `start`."""
        self.name: Final = f"meshrl-{secrets.token_hex(16)}"
        """Of an abstract socket: nothing lies on a disk, and the kernel forgets it with the process."""
        self._handlers = handlers
        self._methods = methods
        self._shared_bytes = shared_bytes
        self._memory: SharedMemory | None = None
        self._listening: list[asyncio.Task[None]] = []
        self._callers: set[asyncio.Task[None]] = set()
        self._answering: set[asyncio.Task[None]] = set()
        """The callers with a call that runs."""

    @property
    def shared_bytes_used(self) -> int:
        """See SharedMemory."""
        return 0 if self._memory is None else self._memory.used_bytes

    def start(self) -> None:
        """Listen. Raises OSError where the process may not."""
        listeners = [(_listener(socket.SOCK_STREAM, f"\0{self.name}"), self._admit)]
        if self._shared_bytes >= REGION_BYTES:
            try:
                self._memory = SharedMemory(self._shared_bytes)
                links = _listener(socket.SOCK_SEQPACKET, address_of_link(self.name))
                listeners.append((links, self._admit_link))
            except (OSError, AttributeError) as error:  # Python may have been built without memfd
                log.warning("long frames go through the local socket, not in memory: %s", error)
        self._listening = [asyncio.create_task(self._listen(*each)) for each in listeners]

    async def close(self, grace_s: float | None) -> None:
        """Take no more calls; those that run have `grace_s` seconds to end. Idempotent."""
        for listening in self._listening:
            listening.cancel()
        for idle in self._callers - self._answering:
            idle.cancel()
        for seconds in (grace_s, None):
            if self._callers:
                await asyncio.wait(list(self._callers), timeout=seconds)
            for late in self._callers:
                late.cancel()
        if self._memory is not None:
            self._memory.close()

    async def _listen(self, listener: socket.socket, admit: Admit) -> None:
        with listener:
            while True:
                try:
                    connection = await _accepted(listener)
                    if is_own(connection):
                        await admit(connection)
                    else:
                        connection.close()
                except OSError as error:  # too many open files, or a caller that has left again
                    log.warning("a connection to the local socket failed: %s", error)
                    await asyncio.sleep(PAUSE_S)

    async def _admit_link(self, connection: socket.socket) -> None:
        assert self._memory is not None
        if len(self._memory.links) < MAX_CALLERS:
            self._memory.admit(connection)
        else:
            connection.close()

    async def _admit(self, connection: socket.socket) -> None:
        if len(self._callers) >= MAX_CALLERS:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        _, wire = await loop.connect_accepted_socket(Wire, connection)
        caller = asyncio.create_task(self._serve(wire))
        self._callers.add(caller)
        caller.add_done_callback(self._callers.discard)
        wire.on_lost = caller.cancel

    async def _serve(self, wire: Wire) -> None:
        """One call after the other, until the caller goes away."""
        this = cast("asyncio.Task[None]", asyncio.current_task())
        call: _Call | None = None
        try:
            while not self._listening[0].cancelled():
                kind, data = await wire.receive()
                if kind is not Kind.HEAD:
                    raise WireError(f"a call begins with {kind.name}")
                self._answering.add(this)
                head = CallHead.FromString(bytes(data))
                caller = None if self._memory is None else self._memory.callers.get(head.memory_key)
                call = _Call(wire, head.metadata, caller)
                # In a task of its own, because calls leave their roles in context variables.
                await asyncio.create_task(self._answer(call, head.method))
                self._answering.discard(this)
        except (WireError, DecodeError) as error:
            log.debug("a caller of the local socket: %s", error)
        finally:
            self._answering.discard(this)
            if call is not None and wire.lost:
                call.cut_off()
            wire.close()

    async def _answer(self, call: _Call, method: str) -> None:
        handler: Handler | None = None
        if method in self._methods:
            handler = self._handlers.service(
                cast(grpc.HandlerCallDetails, SimpleNamespace(method=method))
            )
        try:
            if handler is None:
                await call.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not served here")
            await call.run(handler)
        except grpc.aio.AbortError:
            pass  # `call.end` has it
        await call.finish()


async def _accepted(listener: socket.socket) -> socket.socket:
    """The next connection. Unlike the loop's own method, this loses none when it is cancelled. Raises OSError."""
    loop = asyncio.get_running_loop()
    while True:
        with suppress(BlockingIOError):
            connection, _ = listener.accept()
            connection.setblocking(False)
            return connection
        ready = loop.create_future()
        loop.add_reader(listener, wake, ready)
        try:
            await ready
        finally:
            loop.remove_reader(listener)


def _listener(kind: int, address: str) -> socket.socket:
    """Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
    try:
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


class _Call:
    """One call, as interceptors and servicers see gRPC's context of it."""

    def __init__(self, wire: Wire, metadata: Mapping[str, str], caller: Caller | None) -> None:
        self._wire = wire
        self._caller = caller
        """Whom memory is shared with."""
        self._answer = 0
        self._metadata = tuple(metadata.items())
        self._serialize: Serialize = bytes
        self._complete = False
        """The request has come to its end."""
        self._refers = False
        """The message that was read last is one of references."""
        self._end = CallEnd()

    async def run(self, handler: Any) -> None:
        """Call the handler of a method with a stream on one side. Raises AbortError."""
        self._serialize = handler.response_serializer
        context = cast(Context, self)
        if handler.request_streaming:
            requests = self._requests(handler.request_deserializer)
            await self.write(await handler.stream_unary(requests, context))
        else:
            request = await self._next()
            await handler.unary_stream(bytes(request or b""), context)

    async def finish(self) -> None:
        """Drop what was sent of a call that nobody served; then say how it ended."""
        while await self._next() is not None:
            pass
        if self._end.code and self._caller is not None:
            self._caller.not_received(self._answer)
        await self._wire.send(Kind.END, [self._end.SerializeToString()])

    async def _requests(self, parse: Parse) -> AsyncIterator[Any]:
        """Each message is read when the handler asks for it, after the caller's role and room were looked at."""
        while (message := await self._next()) is not None:
            if self._caller is not None:
                self._caller.let_in()
            if not self._refers:
                yield parse(cast(bytes, message))
            elif self._caller is not None:
                yield parsed(message, parse, self._caller.adopt)
            else:
                raise WireError("a reference to memory that is not shared")

    async def _next(self) -> memoryview | None:
        if self._complete:
            return None
        kind, message = await self._wire.receive(begun=True)
        if kind is Kind.HEAD:
            raise WireError("a call within a call")
        self._complete = kind is Kind.END
        self._refers = kind is Kind.REFERRING
        return None if self._complete else message

    def cut_off(self) -> None:
        """The caller has closed the connection."""
        if self._caller is not None:
            self._caller.cut_off(self._answer)

    def size_of(self, frame: Frame) -> int:
        """What a frame adds to a message, about."""
        maps = self._caller is not None and self._caller.maps
        refers = maps and LEAST_BYTES <= len(frame) <= REGION_BYTES
        return len(frame) // LARGER if refers else len(frame)

    def _hold(self, frame: Frame) -> Shared | None:
        return None if self._caller is None else self._caller.hold(self._answer, frame)

    # gRPC's names

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._metadata

    def peer(self) -> str:
        return "unix:"

    def auth_context(self) -> Mapping[str, Any]:
        return {}

    def code(self) -> int:
        return self._end.code

    async def write(self, message: Any) -> None:
        if not isinstance(message, Bulk):
            await self._wire.send(Kind.MESSAGE, [self._serialize(message)])
            return
        if self._caller is not None:
            self._caller.let_in()
            self._answer = self._answer or self._caller.new_answer()
        await send_message(self._wire, message, self._hold, self._answer)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> None:
        detail = dict(trailing_metadata).get(DETAIL_KEY, b"")
        self._end = CallEnd(code=code.value[0], message=details, detail=detail)
        raise grpc.aio.AbortError
