"""Interceptors around every gRPC handler (metrics, errors, draining), and the limits that servicers set to requests.

Servicers register here instead of with the server. So a servicer translates and delegates, five lines a method, and
has no `try`. A request that protobuf cannot parse is the caller's error (INVALID_ARGUMENT); gRPC alone would answer
UNKNOWN. `Pace` is the lowest rate at which a caller must read an answer, over gRPC and HTTP: unread bytes stay in
memory.

    gRPC ──▶ interceptor 1 ( … interceptor n ( parse, the servicer's method, write what it yields ))
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, Final, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from meshrl.common import tracing
from meshrl.contract.codec import printable
from meshrl.contract.errors import (
    CapacityError,
    InfraError,
    MeshError,
    UnavailableError,
    UserError,
)
from meshrl.rpc.errors import DETAIL_KEY, DRAINING, MAX_TEXT, status_of, to_detail
from meshrl.rpc.transport import MAX_STREAM_BYTES, MAX_WAIT_S, SizedMessage

log = logging.getLogger(__name__)

# In quotes: generic to the type checker only.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Handlers: TypeAlias = "grpc.GenericRpcHandler[Any, Any]"
Behavior: TypeAlias = Callable[[Any, Context], Coroutine[Any, Any, Any]]
"""Takes the request or the stream of requests. Returns the answer, or None if it wrote a stream of answers."""
Interceptor: TypeAlias = Callable[[str, Behavior], Behavior]
"""Takes a method's full name and its behavior, and returns the wrapped behavior. Called once per method."""
Parse: TypeAlias = Callable[[bytes], Any]
PATIENCE_S: Final = 60.0
"""Seconds that a reader may be late."""
LEAST_RATE: Final = 1 << 20
"""Bytes a second."""


class InterceptedHandlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """The handlers of all servicers, each inside `interceptors`, the first outermost.

    This uses neither gRPC's own interceptors nor its registered methods, because grpc.aio waits for each of them
    anew before every call (asyncio.wait over all of them). With 41 methods that was a tenth of the server's work
    for a small call.
    """

    def __init__(self, interceptors: Sequence[Interceptor]) -> None:
        self._interceptors = tuple(interceptors)
        self._offered: list[Handlers] = []
        self._wrapped: dict[str, Handler] = {}
        """Wrapped handlers by method. Never invalidated, because a servicer's methods do not change."""

    def add_generic_rpc_handlers(self, handlers: Sequence[Handlers]) -> None:
        """Called by generated code, as on a grpc server."""
        self._offered += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Called by generated code with the same handlers again. Nothing to do."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """The wrapped handler of a method, or None for an unknown method."""
        method: str = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handlers = (offered.service(handler_call_details) for offered in self._offered)
            handler = next(filter(None, handlers), None)
            if handler is None:
                return None
            wrapped = self._wrapped[method] = self._wrap(handler, method)
        return wrapped

    def _wrap(self, handler: Handler, method: str) -> Handler:
        arity = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
        parse = handler.request_deserializer
        if parse is not None:
            parse = _parse_or_refuse(parse, method)
        read = None if handler.request_streaming else parse
        run = _innermost(getattr(handler, arity), read)
        for interceptor in reversed(self._interceptors):
            run = interceptor(method, run)
        make = getattr(grpc, f"{arity}_rpc_method_handler")
        wrapped: Handler = make(run, parse if read is None else None, handler.response_serializer)
        return wrapped


def _arity(streaming: bool) -> str:
    return "stream" if streaming else "unary"


def _parse_or_refuse(parse: Parse, method: str) -> Parse:
    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            raise UserError(
                f"{method}: the request cannot be parsed as this method's message ({error})"
            ) from error

    return parsed


def _innermost(behavior: Callable[[Any, Context], Any], parse: Parse | None) -> Behavior:
    """Parses a single request, and writes what a generator yields; closes the generator when the caller has left.

    gRPC parses the requests of a stream as they are read.
    """
    writes = inspect.isasyncgenfunction(behavior)

    async def run(request: Any, context: Context) -> Any:
        if parse is not None:
            request = parse(request)
        if not writes:
            return await behavior(request, context)
        answers: AsyncGenerator[Any, None] = behavior(request, context)
        async with aclosing(answers):
            async for answer in answers:
                await context.write(answer)
        return None

    return run


# From a write on loopback to a long poll.
LATENCY_BUCKETS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_STATUS_NAMES: Final = {code.value[0]: code.name for code in grpc.StatusCode}


class CallMetrics:
    """Counts and times the calls of one server. Each has its own registry: a process may have several."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls = Counter(
            "meshrl_rpc_total", "Calls ended.", ["method", "status"], registry=registry
        )
        self._latency = Histogram(
            "meshrl_rpc_seconds",
            "Seconds from the start of a call to its end.",
            ["method"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._running = Gauge(
            "meshrl_rpc_running", "Calls running now.", ["method"], registry=registry
        )

    def interceptor(self, method: str, behavior: Behavior) -> Behavior:
        """The outermost interceptor, so that it sees the status that the others have set."""
        running, latency = self._running.labels(method), self._latency.labels(method)
        ended = cache(partial(self._calls.labels, method))

        async def run(request: Any, context: Context) -> Any:
            start = time.perf_counter()
            status = "CANCELLED"
            running.inc()
            try:
                answer = await behavior(request, context)
                status = "OK"
                return answer
            except grpc.aio.AbortError:
                status = _status_name(context)
                raise
            finally:
                running.dec()
                latency.observe(time.perf_counter() - start)
                ended(status).inc()

        return run


def traced(method: str, behavior: Behavior) -> Behavior:
    """An interceptor: a call that comes with a trace is a span in it."""
    name = method.removeprefix("/meshrl.v1.")

    async def within(header: Any, request: Any, context: Context) -> Any:
        with tracing.called(name, header):
            return await behavior(request, context)

    def run(request: Any, context: Context) -> Coroutine[Any, Any, Any]:
        for key, value in context.invocation_metadata() or ():
            if key == tracing.HEADER:
                return within(value, request, context)
        return behavior(request, context)

    return run


def _status_name(context: Context) -> str:
    # grpc.aio returns the number, although its type stubs promise the enum.
    code: object = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else _STATUS_NAMES.get(code, "UNKNOWN")


def as_status(method: str, behavior: Behavior) -> Behavior:
    """Interceptor: converts errors of a handler to statuses. The only place that catches every exception."""

    async def run(request: Any, context: Context) -> Any:
        try:
            return await behavior(request, context)
        except grpc.aio.BaseError:
            raise  # gRPC's own: already aborted, or the caller left during a write
        except MeshError as error:
            await _abort(context, error)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            # One call may not end the server: `sys.exit` in code that a handler calls is this call's error too.
            log.exception("%s failed", method)
            await _abort(context, InfraError(f"{method}: {type(error).__name__}: {error}"))

    return run


async def _abort(context: Context, error: MeshError) -> None:
    message = printable(error.message[:MAX_TEXT])
    await context.abort(status_of(error), message, ((DETAIL_KEY, to_detail(error)),))


class LongPolls:
    """The calls of `methods`, which may wait long: they end with UnavailableError as soon as the server drains."""

    def __init__(self, methods: Collection[str]) -> None:
        self._methods = methods
        self._waiting: set[asyncio.Timeout] = set()
        self._ended = False

    def end(self) -> None:
        """End those that wait now and refuse others."""
        self._ended = True
        now = asyncio.get_running_loop().time()
        for scope in self._waiting:
            scope.reschedule(now)

    def interceptor(self, method: str, behavior: Behavior) -> Behavior:
        """Wraps only `methods`."""
        if method not in self._methods:
            return behavior

        async def run(request: Any, context: Context) -> Any:
            if self._ended:
                raise UnavailableError(f"{method}: {DRAINING}")
            try:
                async with asyncio.timeout(None) as scope:
                    self._waiting.add(scope)
                    try:
                        return await behavior(request, context)
                    finally:
                        self._waiting.discard(scope)
            except TimeoutError as error:
                if not scope.expired():
                    raise
                raise UnavailableError(f"{method}: {DRAINING}") from error

        return run


RECEIVED: ContextVar[Callable[[int], object]] = ContextVar("received", default=lambda _: None)
"""Called with the bytes of each message of a streamed request; may raise."""


class Answered:
    """Bytes of an answer that are in memory; this one counts none."""

    def __call__(self, more: int) -> None:
        """Hold `more` bytes. Raises BusyError where that is more than there may be."""

    def end(self) -> None:
        """Hold nothing any more."""


ANSWERED: ContextVar[Answered] = ContextVar("answered", default=Answered())  # noqa: B039 (it holds nothing)
Request = TypeVar("Request", bound=SizedMessage)


def bounded(wait_s: float) -> float:
    """Cut a wait to MAX_WAIT_S. Raises UserError if it is negative or NaN."""
    if math.isnan(wait_s) or wait_s < 0:
        raise UserError(f"wait_s is {wait_s}; want 0 or more seconds")
    return min(wait_s, MAX_WAIT_S)


async def collected(
    requests: AsyncIterator[Request], most_bytes: int = MAX_STREAM_BYTES
) -> list[Request]:
    """All messages of a streamed request, which comes in PATIENCE_S and the time that LEAST_RATE gives its bytes.

    Raises:
        CapacityError: beyond `most_bytes`. BusyError. UnavailableError: it does not come in time.
    """
    messages: list[Request] = []
    size, received = 0, RECEIVED.get()
    began = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(PATIENCE_S) as scope:
            async for request in requests:
                size += (more := request.ByteSize())
                received(more)
                if size > most_bytes:
                    raise CapacityError(
                        f"a request of more than {most_bytes} bytes: send it in parts",
                        size=size,
                        limit=most_bytes,
                    )
                messages.append(request)
                scope.reschedule(began + PATIENCE_S + size / LEAST_RATE)
    except TimeoutError as error:
        raise UnavailableError(f"a streamed request sent {size} bytes and did not end") from error
    return messages


class Pace:
    """Calls `late` when a reader has read an answer so much later than LEAST_RATE permits.

    The reader begins with PATIENCE_S. Each second that something takes costs one of it, each LEAST_RATE bytes of it
    give one back, up to PATIENCE_S.
    """

    def __init__(self, late: Callable[[], object]) -> None:
        self._late = late
        self._left_s = PATIENCE_S
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def sends(self, nbytes: int) -> None:
        """Start the timer of `nbytes` that are on their way."""
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        self._left_s += nbytes / LEAST_RATE
        self._timer = loop.call_later(self._left_s, self._late)

    def sent(self) -> None:
        """Stop the timer: the answer was read, or its caller has gone. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            took_s = asyncio.get_running_loop().time() - self._began
            self._left_s = min(PATIENCE_S, self._left_s - took_s)
