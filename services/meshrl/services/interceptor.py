"""Runs every handler of a server inside the same context managers: metrics, errors, draining.

So a servicer translates and delegates, five lines a method, and has no `try`. A request that protobuf cannot parse is
an error of the caller here; gRPC by itself would answer UNKNOWN.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from meshrl.contract.errors import UserError

# In quotes: generic to the type checker only.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Around: TypeAlias = "Callable[[str, Context], AbstractAsyncContextManager[None]]"
"""Given the method's full name and the call's context, what the handler runs in."""
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behavior: TypeAlias = Callable[..., Any]
Parse: TypeAlias = Callable[[bytes], Any]
Serialize: TypeAlias = Callable[[Any], bytes]


@dataclass(frozen=True, slots=True)
class _Unparsed:
    """Stands for a request until the handler's error handling is in place."""

    why: str


class AroundInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Enters `arounds` in order, the first outermost, for every call."""

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
        self._wrapped: dict[str, Handler] = {}
        """By method: what a servicer offers does not change."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The handler of the method, wrapped; None for a method that nobody serves."""
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if not handler:
                return handler
            wrapped = self._wrapped[method] = self._wrap(handler, method)
        return wrapped

    def _wrap(self, handler: Handler, method: str) -> Handler:
        kind = f"{_kind(handler.request_streaming)}_{_kind(handler.response_streaming)}"
        behavior: Behavior = getattr(handler, kind)
        if inspect.isasyncgenfunction(behavior):
            run = self._streaming(behavior, method, handler.request_streaming)
        else:
            run = self._answering(behavior, method, handler.request_streaming)
        parse = self._parsers.get(method, handler.request_deserializer)
        serialize = self._serializers.get(method, handler.response_serializer)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        wrapped: Handler = make(run, parse and _forgiving(parse), serialize)
        return wrapped

    async def _enter(self, stack: AsyncExitStack, method: str, context: Context) -> None:
        for around in self._arounds:
            await stack.enter_async_context(around(method, context))

    def _answering(self, behavior: Behavior, method: str, streamed: bool) -> Behavior:
        async def run(request: Any, context: Context) -> Any:
            async with AsyncExitStack() as stack:
                await self._enter(stack, method, context)
                return await behavior(_parsed(request, method, streamed), context)

        return run

    def _streaming(self, behavior: Behavior, method: str, streamed: bool) -> Behavior:
        async def run(request: Any, context: Context) -> AsyncIterator[Any]:
            async with AsyncExitStack() as stack:
                await self._enter(stack, method, context)
                async for response in behavior(_parsed(request, method, streamed), context):
                    yield response

        return run


def _kind(streaming: bool) -> str:
    return "stream" if streaming else "unary"


def _forgiving(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return _Unparsed(str(error))

    return parsed


def _parsed(request: Any, method: str, streamed: bool) -> Any:
    return _each_checked(request, method) if streamed else _checked(request, method)


async def _each_checked(requests: AsyncIterator[Any], method: str) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request, method)


def _checked(request: Any, method: str) -> Any:
    if isinstance(request, _Unparsed):
        raise UserError(f"{method}: the request is not a message that it takes ({request.why})")
    return request
