"""Interceptors around every gRPC handler: metrics, errors, draining.

Servicers register here instead of with the server. So a servicer translates and delegates, five lines a method, and
has no `try`. A request that protobuf cannot parse is the caller's error (INVALID_ARGUMENT); gRPC alone would answer
UNKNOWN.

    gRPC ──▶ interceptor 1 ( … interceptor n ( parse, the servicer's method, write what it yields ))
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
"""Takes the request or the stream of requests. Returns the answer, or None if it wrote a stream of answers."""
Interceptor: TypeAlias = Callable[[str, Behavior], Behavior]
"""Takes a method's full name and its behavior, and returns the wrapped behavior. Called once per method."""
Parse: TypeAlias = Callable[[bytes], Any]
Serialize: TypeAlias = Callable[[Any], bytes]


class InterceptedHandlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """The handlers of all servicers, each inside `interceptors`, the first outermost.

    This uses neither gRPC's own interceptors nor its registered methods, because grpc.aio waits for each of them
    anew before every call (asyncio.wait over all of them). With 41 methods that was a tenth of the server's work
    for a small call.
    """

    def __init__(
        self,
        interceptors: Sequence[Interceptor],
        parsers: Mapping[str, Parse] = MappingProxyType({}),
        serializers: Mapping[str, Serialize] = MappingProxyType({}),
    ) -> None:
        """`parsers` and `serializers`, by full method name, replace protobuf's own for requests and answers."""
        self._interceptors = tuple(interceptors)
        self._parsers = parsers
        self._serializers = serializers
        self._offered: list[Handlers] = []
        self._wrapped: dict[str, Handler] = {}
        """By method. Never invalidated, because a servicer's methods do not change."""

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
        parse = self._parsers.get(method, handler.request_deserializer)
        if parse is not None:
            parse = _parse_or_refuse(parse, method)
        read = None if handler.request_streaming else parse
        run = _parse_request(_write_answers(getattr(handler, arity)), read)
        for interceptor in reversed(self._interceptors):
            run = interceptor(method, run)
        serialize = self._serializers.get(method, handler.response_serializer)
        make = getattr(grpc, f"{arity}_rpc_method_handler")
        wrapped: Handler = make(run, parse if read is None else None, serialize)
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


def _parse_request(behavior: Behavior, parse: Parse | None) -> Behavior:
    """Parses a single request inside the interceptors. gRPC parses the requests of a stream as they are read."""
    if parse is None:
        return behavior

    async def run(data: bytes, context: Context) -> Any:
        return await behavior(parse(data), context)

    return run


def _write_answers(behavior: Callable[[Any, Context], Any]) -> Behavior:
    """Writes what a generator yields inside the interceptors, and closes it when the caller has left."""
    if not inspect.isasyncgenfunction(behavior):
        return behavior

    async def run(request: Any, context: Context) -> None:
        answers: AsyncGenerator[Any, None] = behavior(request, context)
        async with aclosing(answers):
            async for answer in answers:
                await context.write(answer)

    return run
