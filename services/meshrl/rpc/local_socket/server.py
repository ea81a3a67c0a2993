"""The server's end: the calls of a local socket become calls of the handlers that gRPC has."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, cast

import grpc
from google.protobuf.message import DecodeError

from meshrl.contract.codec import Bulk
from meshrl.rpc.errors import DETAIL_KEY
from meshrl.rpc.interceptors import Context, Handler, InterceptedHandlers, Parse, Serialize
from meshrl.rpc.local_socket.wire import Kind, Wire, WireError, is_own
from meshrl.v1.local_socket_pb2 import CallEnd, CallHead

log = logging.getLogger(__name__)

MAX_CALLERS: Final = 4_096
"""Connections of one socket. The one too many is closed, and whoever made it goes on over gRPC."""
PAUSE_S: Final = 0.1
"""After a connection that could not be accepted."""


class LocalSocketServer:
    """Serves some methods of `handlers` to processes of this user on this machine. Linux only."""

    def __init__(self, handlers: InterceptedHandlers, methods: Collection[str]) -> None:
        """`methods`: full names. Nothing listens before `start`."""
        self.name: Final = f"meshrl-{secrets.token_hex(16)}"
        """Of an abstract socket: nothing lies on a disk, and the kernel forgets it with the process."""
        self._handlers = handlers
        self._methods = methods
        self._listening: asyncio.Task[None] | None = None
        self._callers: set[asyncio.Task[None]] = set()
        self._answering: set[asyncio.Task[None]] = set()
        """The callers with a call that runs."""

    def start(self) -> None:
        """Listen. Raises OSError where the process may not."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(f"\0{self.name}")
            listener.listen(socket.SOMAXCONN)
        except OSError:
            listener.close()
            raise
        self._listening = asyncio.create_task(self._listen(listener))

    async def close(self, grace_s: float | None) -> None:
        """Take no more calls; those that run have `grace_s` seconds to end. Idempotent."""
        if self._listening is None:
            return
        self._listening.cancel()
        for idle in self._callers - self._answering:
            idle.cancel()
        for seconds in (grace_s, None):
            if self._callers:
                await asyncio.wait(list(self._callers), timeout=seconds)
            for late in self._callers:
                late.cancel()

    async def _listen(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    await self._accept(listener)
                except OSError as error:  # too many open files, or a caller that has left again
                    log.warning("a connection to the local socket failed: %s", error)
                    await asyncio.sleep(PAUSE_S)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        connection, _ = await loop.sock_accept(listener)
        if not is_own(connection) or len(self._callers) >= MAX_CALLERS:
            connection.close()
            return
        _, wire = await loop.connect_accepted_socket(Wire, connection)
        caller = asyncio.create_task(self._serve(wire))
        self._callers.add(caller)
        caller.add_done_callback(self._callers.discard)
        wire.on_lost = caller.cancel

    async def _serve(self, wire: Wire) -> None:
        """One call after the other, until the caller goes away."""
        this = cast("asyncio.Task[None]", asyncio.current_task())
        assert self._listening is not None
        try:
            while not self._listening.cancelled():
                kind, data = await wire.receive()
                if kind is not Kind.HEAD:
                    raise WireError(f"a call begins with {kind.name}")
                self._answering.add(this)
                # In a task of its own, because calls leave their roles in context variables.
                await asyncio.create_task(self._answer(wire, CallHead.FromString(bytes(data))))
                self._answering.discard(this)
        except (WireError, DecodeError) as error:
            log.debug("a caller of the local socket: %s", error)
        finally:
            self._answering.discard(this)
            wire.close()

    async def _answer(self, wire: Wire, head: CallHead) -> None:
        call = _Call(wire, head.metadata)
        handler: Handler | None = None
        if head.method in self._methods:
            handler = self._handlers.service(
                cast(grpc.HandlerCallDetails, SimpleNamespace(method=head.method))
            )
        try:
            if handler is None:
                await call.abort(grpc.StatusCode.UNIMPLEMENTED, f"{head.method} is not served here")
            await call.run(handler)
        except grpc.aio.AbortError:
            pass  # `call.end` has it
        await call.finish()


class _Call:
    """One call, as interceptors and servicers see gRPC's context of it."""

    def __init__(self, wire: Wire, metadata: Mapping[str, str]) -> None:
        self._wire = wire
        self._metadata = tuple(metadata.items())
        self._serialize: Serialize = bytes
        self._complete = False
        """The request has come to its end."""
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
        await self._wire.send(Kind.END, [self._end.SerializeToString()])

    async def _requests(self, parse: Parse) -> AsyncIterator[Any]:
        """Each message is read when the handler asks for it, after the caller's role and room were looked at."""
        while (message := await self._next()) is not None:
            yield parse(cast(bytes, message))

    async def _next(self) -> memoryview | None:
        if self._complete:
            return None
        kind, message = await self._wire.receive(begun=True)
        if kind is Kind.HEAD:
            raise WireError("a call within a call")
        self._complete = kind is Kind.END
        return None if self._complete else message

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
        parts = message.parts() if isinstance(message, Bulk) else [self._serialize(message)]
        await self._wire.send(Kind.MESSAGE, parts)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> None:
        detail = dict(trailing_metadata).get(DETAIL_KEY, b"")
        self._end = CallEnd(code=code.value[0], message=details, detail=detail)
        raise grpc.aio.AbortError
