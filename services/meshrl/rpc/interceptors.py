"""What doors attach to in a server's place: every handler runs inside the same functions (metrics, errors, draining).

So a servicer translates and delegates, five lines a method, and has no `try`. A request that protobuf cannot parse is
an error of the caller here; gRPC by itself would answer UNKNOWN.

    gRPC ──▶ around 1 ( … around n ( parse, the servicer's method, write what it yields ))
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from meshrl.contract.errors import UserError

# In quotes: generic to the type checker only.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Handlers: TypeAlias = "grpc.GenericRpcHandler[Any, Any]"
Behavior: TypeAlias = Callable[[Any, Context], Coroutine[Any, Any, Any]]
"""Takes the request, or the stream of requests; returns the answer, or None where it has written a stream of them."""
Around: TypeAlias = Callable[[str, Behavior], Behavior]
"""Given a method's full name and what runs there, the same with something around it; asked once per method."""
Parse: TypeAlias = Callable[[bytes], Any]
Serialize: TypeAlias = Callable[[Any], bytes]


class InterceptedHandlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """The handlers of all doors, each inside `arounds`, the first outermost.

    Neither an interceptor nor registered methods: of these grpc.aio waits for each anew before every call
    (asyncio.wait over all of them). With 41 methods that was a tenth of the server's work for a small call.
    """

    def __init__(
        self,
        arounds: Sequence[Around],
        parsers: Mapping[str, Parse] = MappingProxyType({}),
        serializers: Mapping[str, Serialize] = MappingProxyType({}),
    ) -> None:
        """`parsers` of requests and `serializers` of answers, by method, instead of protobuf's own."""
        self._arounds = tuple(arounds)
        self._parsers = parsers
        self._serializers = serializers
        self._offered: list[Handlers] = []
        self._wrapped: dict[str, Handler] = {}
        """By method: what a servicer offers does not change."""

    def add_generic_rpc_handlers(self, handlers: Sequence[Handlers]) -> None:
        """As a server's; called by generated code."""
        self._offered += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """As a server's; called by generated code with the handlers that it has given already."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """The handler of the method, wrapped; None for a method that nobody serves."""
        method: str = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            found = (offered.service(handler_call_details) for offered in self._offered)
            handler = next(filter(None, found), None)
            if handler is None:
                return None
            wrapped = self._wrapped[method] = self._wrap(handler, method)
        return wrapped

    def _wrap(self, handler: Handler, method: str) -> Handler:
        kind = f"{_kind(handler.request_streaming)}_{_kind(handler.response_streaming)}"
        parse = self._parsers.get(method, handler.request_deserializer)
        if parse is not None:
            parse = _refusing(parse, method)
        read = None if handler.request_streaming else parse
        run = _reading(_writing(getattr(handler, kind)), read)
        for around in reversed(self._arounds):
            run = around(method, run)
        serialize = self._serializers.get(method, handler.response_serializer)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        wrapped: Handler = make(run, parse if read is None else None, serialize)
        return wrapped


def _kind(streaming: bool) -> str:
    return "stream" if streaming else "unary"


def _refusing(parse: Parse, method: str) -> Parse:
    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            raise UserError(
                f"{method}: the request is not a message that it takes ({error})"
            ) from error

    return parsed


def _reading(behavior: Behavior, parse: Parse | None) -> Behavior:
    """Parses a single request inside of what is around it; gRPC parses those of a stream as they are asked for."""
    if parse is None:
        return behavior

    async def run(data: bytes, context: Context) -> Any:
        return await behavior(parse(data), context)

    return run


def _writing(behavior: Callable[[Any, Context], Any]) -> Behavior:
    """What a generator yields is written inside of what is around it; it is closed behind a caller who has left."""
    if not inspect.isasyncgenfunction(behavior):
        return behavior

    async def run(request: Any, context: Context) -> None:
        answers: AsyncGenerator[Any, None] = behavior(request, context)
        async with aclosing(answers):
            async for answer in answers:
                await context.write(answer)

    return run
