"""One simulated RPC and the channel that makes it: real clients above, bytes below, real servicers at the other end.

    client ──serialize──▶ Call ──bytes, in order, later──▶ parse ──▶ interceptors ──▶ servicer
       ▲                                                                                 │
       └──parse── bytes, in order, later ──────────────────────────────────serialize ◀───┘

A call has any arity: messages in both directions, in order, and a status at the end. What can go wrong is what one
TCP connection under gRPC can do: a call that breaks before its request arrived, after it or between (UNAVAILABLE), a
request that is worked on after its caller gave it up, a host that is silent for a while and then sends what it had, a
peer that dies and closes its connections, one that dies and does not, a link that is slow. A message is never lost
alone, nor do messages of one call change places.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Final, cast

import grpc

from tests.simulation.loop import PROCESS, Process, context_of, spawn
from tests.simulation.network import Endpoint, Network, Weather
from tests.simulation.server_end import (
    EOF,
    Inbox,
    Metadata,
    Requests,
    ServerContext,
    error_of,
)

KEEPALIVE_S: Final = 30.0
"""A peer that is silent for so long is given up (transport.py: a ping after 20 s, 10 s for its answer)."""
CONNECT_S: Final = 2.0
"""An attempt to connect to a silent host ends after so long."""


def connect(network: Network, address: str) -> grpc.aio.Channel:
    """The `connect` that product code is given, bound to a network."""
    return cast("grpc.aio.Channel", Channel(network, address))


class Channel:
    """As much of `grpc.aio.Channel` as clients use."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address
        self._calls: dict[Call, None] = {}
        self._closed = False

    async def close(self, grace: float | None = None) -> None:
        """Cancel what runs."""
        self._closed = True
        for call in list(self._calls):
            call.cancel()

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close(None)

    def _method(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: object,
    ) -> Callable[..., Call]:
        def begin(
            request: Any = None,
            *,
            timeout: float | None = None,
            metadata: Iterable[tuple[str, str | bytes]] = (),
            **_: object,
        ) -> Call:
            call = Call(
                self._network,
                self._address,
                method,
                request_serializer,
                response_deserializer,
                tuple(metadata or ()),
            )
            self._calls[call] = None
            call.on_over = lambda: self._calls.pop(call, None)
            call.begin(request, timeout, closed=self._closed)
            return call

        return begin

    unary_unary = unary_stream = stream_unary = stream_stream = _method


class Call:
    """One RPC: the client's end is this object, the server's end its `ServerContext`."""

    def __init__(
        self,
        network: Network,
        address: str,
        method: str,
        serialize: Callable[[Any], bytes],
        parse: Callable[[bytes], Any],
        metadata: Metadata,
    ) -> None:
        self._network = network
        self._loop = network.loop()
        self._address = address
        self.method = method
        self._serialize = serialize
        self._parse = parse
        self.metadata = metadata
        self.client = PROCESS.get()
        self.server: Process | None = None
        self._context = context_of(self.client)
        self.requests = Inbox(self._loop)
        """At the server."""
        self._answers = Inbox(self._loop)
        """At the client."""
        self._status: asyncio.Future[grpc.aio.AioRpcError | None] = self._loop.create_future()
        self._serving: asyncio.Task[None] | None = None
        self._sent_until = [0.0, 0.0]
        """When the last message of each direction arrives: 0 to the server, 1 to the client."""
        self._waiters: list[asyncio.Future[None]] = []
        """Futures of those who wait for the status."""
        self._timer: asyncio.TimerHandle | None = None
        """Timer of the deadline."""
        self._given_up = False
        self._late = False
        self.on_over: Callable[[], object] = _nothing

    # --- the client's end

    def begin(self, request: Any, timeout: float | None, *, closed: bool) -> None:
        """Send what there is to send."""
        network, loop = self._network, self._loop
        network.opened(self)
        if self.client is not None:
            self.client.on_death[self._client_died] = None
        if closed:
            self._finish(error_of(grpc.StatusCode.CANCELLED, "the channel is closed"))
            return
        if timeout is not None:
            self._timer = loop.call_later(timeout, self._deadline)
        messages = [] if request is None else request
        if hasattr(request, "SerializeToString"):
            messages = [request]
        data = [self._serialize(message) for message in messages]
        weather = network.weather(self.client.name) if self.client is not None else Weather()
        now = loop.time()
        delay = network.delay(self.client)
        if weather.break_requests_until > now:
            loop.call_later(delay, self._broken, "the connection was reset")
            return
        if weather.late_requests_until > now:
            self._late = True
            loop.call_later(delay, self._broken, "the connection was reset")
            delay += network.lateness()
        silent = network.silent_until(self.client) - now
        if silent > 0:
            if silent > CONNECT_S:
                loop.call_later(CONNECT_S, self._broken, "the host does not answer")
                return
            delay += silent
        open_ended = request is None
        loop.call_later(delay, self._arrive, data, open_ended, context=context_of(None))
        self._sent_until[0] = now + delay

    def _arrive(self, data: Sequence[bytes], open_ended: bool) -> None:
        """The request is at the server's host."""
        endpoint = self._network.endpoint(self._address)
        if endpoint is None:
            self._to_client(self._broken, "connection refused")
            return
        if self._given_up and not self._late:
            return
        silent = self._network.silent_until(endpoint.process, self.client) - self._loop.time()
        if silent > 0:
            if silent < CONNECT_S:
                self._loop.call_later(silent, self._arrive, data, open_ended)
            else:
                self._to_client(self._broken, "the host does not answer")
            return
        self.server = endpoint.process
        if self.server is not None:
            self.server.on_death[self._server_died] = None
        for item in data:
            self.requests.put(item)
        if not open_ended:
            self.requests.end()
        context = ServerContext(self)
        self._serving = spawn(self._loop, self.server, self._serve(endpoint, context), self.method)
        endpoint.served[self] = None
        if self._late:  # behind the request comes the end of its connection
            self._loop.call_later(self._network.delay(self.client), self._stop_serving)

    def __await__(self) -> Generator[Any, None, Any]:
        """The only answer."""
        return self._only_answer().__await__()

    async def _only_answer(self) -> Any:
        if not self._status.done():
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        error = self._status.result()
        if error is not None:
            raise error
        data = await self._answers.get()
        assert data is not None
        return self._parse(data)

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is EOF:
            raise StopAsyncIteration
        return message

    async def read(self) -> Any:
        """The next answer, or `EOF`. Raises AioRpcError at the end of a call that failed."""
        try:
            data = await self._answers.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if data is not None:
            return self._parse(data)
        error = self._status.result()
        if error is not None:
            raise error
        return EOF

    async def write(self, message: Any) -> None:
        """Send one more request. Raises AioRpcError after the end."""
        if self._status.done():
            raise self._status.result() or error_of(grpc.StatusCode.CANCELLED, "the call is over")
        self._transmit(0, self.requests.put, self._serialize(message))

    async def done_writing(self) -> None:
        """No request will follow."""
        self._transmit(0, self.requests.end)

    def cancel(self) -> bool:
        """Give the call up; the server hears of it."""
        if self._status.done():
            return False
        self._finish(error_of(grpc.StatusCode.CANCELLED, "cancelled by the client"))
        return True

    def done(self) -> bool:
        """True when it is over."""
        return self._status.done()

    def add_done_callback(self, done: Callable[[Call], object]) -> None:
        """Call `done` at the end."""
        self._status.add_done_callback(lambda _: done(self))

    async def code(self) -> grpc.StatusCode:
        """The final status."""
        error = await asyncio.shield(self._status)
        return grpc.StatusCode.OK if error is None else error.code()

    def involves(self, name: str) -> bool:
        """True if one of its ends is the process `name`."""
        return any(end is not None and end.name == name for end in (self.client, self.server))

    def watch_silence(self) -> None:
        """A silence began: break the call at both ends if it outlasts the keepalive."""

        def look() -> None:
            if self._network.silent_until(self.client, self.server) > self._loop.time():
                self._stop_serving()
                self._loop.call_soon(self._broken, "keepalive watchdog timeout", context=context)

        context = self._context
        self._loop.call_later(KEEPALIVE_S, look, context=context_of(None))

    def reset(self) -> None:
        """Break the call at both ends; each hears of it by itself."""
        network, loop = self._network, self._loop
        loop.call_later(network.delay(self.client), self._stop_serving, context=context_of(None))
        self._to_client(self._broken, "the connection was reset")

    # --- transport

    def _transmit(self, direction: int, arrive: Callable[..., object], *args: Any) -> None:
        """Let a message arrive after those before it."""
        network, loop = self._network, self._loop
        now = loop.time()
        at = max(
            now + network.delay(self.client, self.server),
            network.silent_until(self.client, self.server),
            self._sent_until[direction] + 1e-9,
        )
        self._sent_until[direction] = at

        def deliver() -> None:
            until = network.silent_until(self.client, self.server)
            if until > loop.time():  # a silence began meanwhile
                loop.call_at(until, deliver)
            else:
                arrive(*args)

        context = context_of(self.server) if direction == 0 else self._context
        loop.call_at(at, deliver, context=context)

    def _to_client(self, call: Callable[..., object], *args: Any) -> None:
        self._loop.call_later(self._network.delay(self.client), call, *args, context=self._context)

    def _finish(self, error: grpc.aio.AioRpcError | None) -> None:
        """The client's end is over."""
        if self._status.done():
            return
        self._status.set_result(error)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
        self._answers.end()
        self._network.over(self)
        self.on_over()
        self.on_over = _nothing  # it refers to this call
        if self.client is not None:
            self.client.on_death.pop(self._client_died, None)
        if error is not None and not self._late:
            self._client_left()

    def _broken(self, why: str) -> None:
        self._finish(error_of(grpc.StatusCode.UNAVAILABLE, why))

    def _deadline(self) -> None:
        self._finish(error_of(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _client_died(self) -> None:
        self._network.over(self)
        self._client_left()

    def _client_left(self) -> None:
        """The server's end hears of it, unless the network is silent: then after the keepalive."""
        self._given_up = True
        silent = self._network.silent_until(self.client, self.server) - self._loop.time()
        delay = self._network.delay(self.client)
        if silent > 0:
            delay += min(silent, KEEPALIVE_S)
        self._loop.call_later(delay, self._stop_serving, context=context_of(None))

    def _stop_serving(self) -> None:
        if self._serving is not None and not self._serving.done():
            server = self.server
            if server is None or not server.dead:
                self._loop.call_soon(self._serving.cancel, context=context_of(server))

    def _server_died(self) -> None:
        """A killed process's host closes its connections."""
        silent = self._network.silent_until(self.client, self.server) - self._loop.time()
        delay = self._network.delay(self.client) + min(max(0.0, silent), KEEPALIVE_S)
        self._loop.call_later(
            delay, self._broken, "the connection was reset", context=self._context
        )

    # --- the server's end

    def end_draining(self) -> None:
        """The server ends, and this call only waits."""
        self._stop_serving()
        self._to_client(self._broken, "the service is draining")

    async def until_served(self) -> None:
        """Wait until the server is done with it."""
        if self._serving is not None:
            await asyncio.wait({self._serving})

    async def _serve(self, endpoint: Endpoint, context: ServerContext) -> None:
        details = cast("grpc.HandlerCallDetails", SimpleNamespace(method=self.method))
        handler: Any = endpoint.handlers.service(details)
        try:
            if handler is None:
                self._end(error_of(grpc.StatusCode.UNIMPLEMENTED, f"{self.method} is unknown"))
                return
            if handler.request_streaming:
                request: Any = Requests(self.requests, handler.request_deserializer)
                run = handler.stream_stream if handler.response_streaming else handler.stream_unary
            else:
                data = await self.requests.get()
                parse = handler.request_deserializer
                request = data if parse is None else parse(data)
                run = handler.unary_stream if handler.response_streaming else handler.unary_unary
            context.serialize = handler.response_serializer
            context.parse = handler.request_deserializer
            answer = await run(request, context)
            if not handler.response_streaming:
                await context.write(answer)
            self._end(None)
        except grpc.aio.AbortError:
            self._end(context.error)
        finally:
            endpoint.served.pop(self, None)
            if self.server is not None:
                self.server.on_death.pop(self._server_died, None)

    def _end(self, error: grpc.aio.AioRpcError | None) -> None:
        weather = self._network.weather(self.client.name) if self.client is not None else None
        if weather is not None and weather.break_answers_until > self._loop.time():
            error = error_of(grpc.StatusCode.UNAVAILABLE, "the connection was reset")
        self._transmit(1, self._finish, error)

    def answer(self, data: bytes) -> None:
        """Send one message to the client."""
        self._transmit(1, self._answers.put, data)


def _nothing() -> None:
    """Does nothing."""
