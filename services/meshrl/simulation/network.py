"""A simulated network under the real clients, codec, interceptors and servicers.

    client ──serialize──▶ Link ──bytes, in order, later──▶ parse ──▶ interceptors ──▶ servicer
       ▲                                                                                 │
       └──parse── bytes, in order, later ──────────────────────────────────serialize ◀───┘

One `Call` is one RPC of any arity: messages in both directions, in order, and a status at the end. What can go wrong
is what one TCP connection under gRPC can do: a call that breaks before or after its request arrived (UNAVAILABLE), a
request that is worked on after its caller gave it up, a host that is silent for a while and then sends what it had, a
peer that dies and closes its connections, one that dies and does not, a link that is slow. A message is never lost
alone, nor do messages of one call change places.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, NoReturn, cast

import grpc

from meshrl.rpc.interceptors import InterceptedHandlers, as_status
from meshrl.rpc.runtime import Servicer
from meshrl.simulation.loop import PROCESS, Process, SimulatedLoop, context_of, spawn

KEEPALIVE_S: Final = 30.0
"""A peer that is silent for so long is given up (transport.py: a ping after 20 s, 10 s for its answer)."""
CONNECT_S: Final = 2.0
"""An attempt to connect to a silent host ends after so long."""

EOF: Final = grpc.aio.EOF  # type: ignore[attr-defined]  # unknown to its stubs

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """How long messages take, in seconds."""

    mean_s: float = 0.002
    slow_share: float = 0.02
    """Share of messages that take longer."""
    slow_mean_s: float = 0.2


@dataclass(slots=True)
class Weather:
    """What is wrong with one process's network now: each until a moment of the virtual clock."""

    cut_until: float = 0.0
    """Nothing gets in or out."""
    break_requests_until: float = 0.0
    """Calls break before their request arrives."""
    break_answers_until: float = 0.0
    """Calls break after they were worked on."""
    late_requests_until: float = 0.0
    """Calls break at once for the caller, and arrive seconds later."""
    slow_until: float = 0.0
    """Every message takes SLOWER times as long."""


SLOWER: Final = 50.0
STRAY_SHARE: Final = 0.3
"""Share of calls that reach an older process behind an address, while it lives."""
LATEST_S: Final = 8.0
"""The longest delay of a request that its caller gave up."""


class Endpoint:
    """A listening process and its handlers."""

    def __init__(
        self, process: Process | None, handlers: InterceptedHandlers, waits: frozenset[str]
    ) -> None:
        self.process = process
        self.handlers = handlers
        self.waits = waits
        """Full names of the methods that may wait long."""
        self.stopped = False
        self.served: dict[Call, None] = {}
        """The calls that its handlers work on, also those that their clients gave up in silence."""

    @property
    def alive(self) -> bool:
        """False after it stopped, or its process died."""
        return not self.stopped and (self.process is None or not self.process.dead)


class Network:
    """All links of one run."""

    def __init__(self, loop: SimulatedLoop, seed: int, delays: Delays) -> None:
        self._loop = loop
        self._delays = delays
        self._random = random.Random(f"network {seed}")
        self._endpoints: dict[str, list[Endpoint]] = {}
        """By address, the newest last: a process that counts as dead listens on."""
        self._weather: dict[str, Weather] = {}
        self._calls: dict[Call, None] = {}
        self.made = 0
        """Calls so far."""

    def listen(self, address: str, servicers: Sequence[Servicer]) -> Endpoint:
        """Serve `servicers` in the process that runs, beside those that listen there and live."""

        def table(name: str) -> Mapping[str, Callable[[Any], Any]]:
            return {
                f"/{servicer.service}/{method}": function
                for servicer in servicers
                for method, function in getattr(servicer, name, {}).items()
            }

        handlers = InterceptedHandlers((as_status,), table("parsers"), table("serializers"))
        for servicer in servicers:
            servicer.attach(cast("grpc.aio.Server", handlers))
        waits = frozenset(f"/{each.service}/{name}" for each in servicers for name in each.waits)
        endpoint = Endpoint(PROCESS.get(), handlers, waits)
        self._endpoints[address] = [*self._living(address), endpoint]
        return endpoint

    async def stop(self, endpoint: Endpoint) -> None:
        """As a server drains: refuse new calls, end those that wait for something, let the others finish."""
        endpoint.stopped = True
        for call in list(endpoint.served):
            if call.method in endpoint.waits:
                call.end_draining()
        for call in list(endpoint.served):
            await call.until_served()

    def connect(self, address: str) -> grpc.aio.Channel:
        """What product code takes as its `connect`."""
        return cast("grpc.aio.Channel", Channel(self, address))

    def weather(self, name: str) -> Weather:
        """The state of the links of the process `name`."""
        return self._weather.setdefault(name, Weather())

    def cut(self, name: str, seconds: float) -> None:
        """Silence the process `name`; calls that it has open break if the silence outlasts the keepalive."""
        weather = self.weather(name)
        weather.cut_until = max(weather.cut_until, self._loop.time() + seconds)
        for call in list(self._calls):
            if call.involves(name):
                call.watch_silence()

    def silent_until(self, *processes: Process | None) -> float:
        """Until when nothing passes between `processes`; in the past if something does."""
        names = [process.name for process in processes if process is not None]
        return max(
            (self._weather[name].cut_until for name in names if name in self._weather), default=0.0
        )

    def endpoint(self, address: str) -> Endpoint | None:
        """Who listens: if several do, as behind a service's name, mostly the newest."""
        living = self._living(address)
        if len(living) > 1 and self._random.random() < STRAY_SHARE:
            return living[0]
        return living[-1] if living else None

    def _living(self, address: str) -> list[Endpoint]:
        return [endpoint for endpoint in self._endpoints.get(address, ()) if endpoint.alive]

    def delay(self, *processes: Process | None) -> float:
        """Of one message between `processes`."""
        delays, draw = self._delays, self._random
        seconds = draw.expovariate(1 / delays.mean_s)
        if draw.random() < delays.slow_share:
            seconds += draw.expovariate(1 / delays.slow_mean_s)
        now = self._loop.time()
        for process in processes:
            weather = self._weather.get(process.name) if process is not None else None
            if weather is not None and weather.slow_until > now:
                seconds *= SLOWER
        return seconds

    def lateness(self) -> float:
        """Of a request that its caller has given up."""
        return self._random.uniform(0.0, LATEST_S)

    def opened(self, call: Call) -> None:
        """Keep `call` until it is over."""
        self.made += 1
        self._calls[call] = None

    def over(self, call: Call) -> None:
        """Forget `call`."""
        self._calls.pop(call, None)

    @property
    def open_calls(self) -> int:
        """Calls that are not over."""
        return len(self._calls)

    def loop(self) -> SimulatedLoop:
        """The run's loop."""
        return self._loop


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


class _Inbox:
    """Messages of one direction, in order, and the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[bytes] = deque()
        self._ended = False
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: bytes) -> None:
        self._items.append(item)
        self._wake()

    def end(self) -> None:
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
        self.requests = _Inbox(self._loop)
        """At the server."""
        self._answers = _Inbox(self._loop)
        """At the client."""
        self._status: asyncio.Future[grpc.aio.AioRpcError | None] = self._loop.create_future()
        self._serving: asyncio.Task[None] | None = None
        self._sent_until = [0.0, 0.0]
        """When the last message of each direction arrives: 0 to the server, 1 to the client."""
        self._given_up = False
        self._late = False
        self.on_over: Callable[[], object] = lambda: None

    # --- the client's end

    def begin(self, request: Any, timeout: float | None, *, closed: bool) -> None:
        """Send what there is to send."""
        network, loop = self._network, self._loop
        network.opened(self)
        if self.client is not None:
            self.client.on_death[self._client_died] = None
        if closed:
            self._finish(_error(grpc.StatusCode.CANCELLED, "the channel is closed"))
            return
        if timeout is not None:
            loop.call_later(timeout, self._deadline)
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
        self._serving = spawn(
            self._loop, self.server, self._serve(endpoint.handlers, context), self.method
        )
        endpoint.served[self] = None
        self._serving.add_done_callback(lambda _: endpoint.served.pop(self, None))
        if self._late:  # behind the request comes the end of its connection
            self._loop.call_later(self._network.delay(self.client), self._stop_serving)

    def __await__(self) -> Generator[Any, None, Any]:
        """The only answer."""
        return self._only_answer().__await__()

    async def _only_answer(self) -> Any:
        try:
            error = await asyncio.shield(self._status)
        except asyncio.CancelledError:
            self.cancel()
            raise
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
            raise self._status.result() or _error(grpc.StatusCode.CANCELLED, "the call is over")
        self._transmit(0, self.requests.put, self._serialize(message))

    async def done_writing(self) -> None:
        """No request will follow."""
        self._transmit(0, self.requests.end)

    def cancel(self) -> bool:
        """Give the call up; the server hears of it."""
        if self._status.done():
            return False
        self._finish(_error(grpc.StatusCode.CANCELLED, "cancelled by the client"))
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
        self._answers.end()
        self._network.over(self)
        self.on_over()
        if self.client is not None:
            self.client.on_death.pop(self._client_died, None)
        if error is not None and not self._late:
            self._client_left()

    def _broken(self, why: str) -> None:
        self._finish(_error(grpc.StatusCode.UNAVAILABLE, why))

    def _deadline(self) -> None:
        self._finish(_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

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

    async def _serve(self, handlers: InterceptedHandlers, context: ServerContext) -> None:
        details = cast("grpc.HandlerCallDetails", SimpleNamespace(method=self.method))
        handler: Any = handlers.service(details)
        try:
            if handler is None:
                self._end(_error(grpc.StatusCode.UNIMPLEMENTED, f"{self.method} is unknown"))
                return
            if handler.request_streaming:
                request: Any = _Requests(self.requests, handler.request_deserializer)
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
            if self.server is not None:
                self.server.on_death.pop(self._server_died, None)

    def _end(self, error: grpc.aio.AioRpcError | None) -> None:
        weather = self._network.weather(self.client.name) if self.client is not None else None
        if weather is not None and weather.break_answers_until > self._loop.time():
            error = _error(grpc.StatusCode.UNAVAILABLE, "the connection was reset")
        self._transmit(1, self._finish, error)

    def answer(self, data: bytes) -> None:
        """Send one message to the client."""
        self._transmit(1, self._answers.put, data)


class _Requests:
    """The requests of a stream, parsed as they are read."""

    def __init__(self, inbox: _Inbox, parse: Callable[[bytes], Any]) -> None:
        self._inbox = inbox
        self._parse = parse

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        data = await self._inbox.get()
        if data is None:
            raise StopAsyncIteration
        return self._parse(data)


class ServerContext:
    """As much of `grpc.aio.ServicerContext` as servicers and interceptors use."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.serialize: Callable[[Any], bytes] = bytes
        self.parse: Callable[[bytes], Any] | None = None
        self.error: grpc.aio.AioRpcError | None = None

    def invocation_metadata(self) -> Metadata:
        """Of the client."""
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
        self.error = _error(code, details, trailing_metadata)
        raise grpc.aio.AbortError


def _error(
    code: grpc.StatusCode, details: str, trailing: Iterable[tuple[str, str | bytes]] = ()
) -> grpc.aio.AioRpcError:
    metadata: Any = grpc.aio.Metadata
    return grpc.aio.AioRpcError(code, metadata(), metadata(*trailing), details, None)
