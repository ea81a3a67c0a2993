"""The server's end of a simulated RPC: the messages that wait to be read, and what a servicer takes for a context."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn, Protocol

import grpc

from tests.simulation.loop import Process

EOF: Final = grpc.aio.EOF  # type: ignore[attr-defined]  # unknown to its stubs

Metadata = tuple[tuple[str, str | bytes], ...]


class Inbox:
    """Messages of one direction, in order, and the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[bytes] = deque()
        self._ended = False
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: bytes) -> None:
        """One more message."""
        self._items.append(item)
        self._wake()

    def end(self) -> None:
        """None will follow."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> bytes | None:
        """The next message; None after the last one."""
        while not self._items:
            if self._ended:
                return None
            self._reader = self._loop.create_future()
            await self._reader
        return self._items.popleft()


class ServedCall(Protocol):
    """The call as the server's end sees it."""

    metadata: Metadata
    client: Process | None
    requests: Inbox

    def answer(self, data: bytes) -> None:
        """Send one message to the client."""


class Requests:
    """The requests of a stream, parsed as they are read."""

    def __init__(self, inbox: Inbox, parse: Callable[[bytes], Any]) -> None:
        self._inbox = inbox
        self._parse = parse

    def __aiter__(self) -> Requests:
        return self

    async def __anext__(self) -> Any:
        data = await self._inbox.get()
        if data is None:
            raise StopAsyncIteration
        return self._parse(data)


class ServerContext:
    """As much of `grpc.aio.ServicerContext` as servicers and interceptors use."""

    def __init__(self, call: ServedCall) -> None:
        self._call = call
        self.serialize: Callable[[Any], bytes] = bytes
        self.parse: Callable[[bytes], Any] | None = None
        self.error: grpc.aio.AioRpcError | None = None

    def invocation_metadata(self) -> Metadata:
        """The client's metadata."""
        return self._call.metadata

    def peer(self) -> str:
        """The client's name."""
        return self._call.client.name if self._call.client is not None else "outside"

    async def write(self, message: Any) -> None:
        """Send one answer."""
        self._call.answer(self.serialize(message))

    async def read(self) -> Any:
        """The next request, or `EOF`."""
        data = await self._call.requests.get()
        if data is None:
            return EOF
        return data if self.parse is None else self.parse(data)

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Iterable[tuple[str, str | bytes]] = (),
    ) -> NoReturn:
        """End the call with a status."""
        self.error = error_of(code, details, trailing_metadata)
        raise grpc.aio.AbortError


def error_of(
    code: grpc.StatusCode, details: str, trailing: Iterable[tuple[str, str | bytes]] = ()
) -> grpc.aio.AioRpcError:
    """The error that a client gets for a status."""
    metadata: Any = grpc.aio.Metadata
    return grpc.aio.AioRpcError(code, metadata(), metadata(*trailing), details, None)
