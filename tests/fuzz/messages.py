"""Real requests of a service as bytes, and corruptions of them."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeAlias

import grpc
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

Request: TypeAlias = list[bytes]
"""The messages of one call; a call that is not streamed has one."""


class Recorder(grpc.GenericRpcHandler):
    """A server that keeps the bytes of every request and passes it on. Knows no method and no message."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self.requests: dict[str, list[Request]] = {}
        """Requests by full name of the method."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method

        async def forward(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            request = [message async for message in messages]
            self.requests.setdefault(method, []).append(request)
            try:
                async for answer in self._channel.stream_stream(method)(iter(request)):
                    yield answer
            except grpc.aio.AioRpcError as error:
                trailing = tuple(error.trailing_metadata() or ())
                await context.abort(error.code(), error.details(), trailing)

        return grpc.stream_stream_rpc_method_handler(forward)

    async def close(self) -> None:
        await self._channel.close()


Spoil: TypeAlias = Callable[[Request, random.Random], Request]


def _one(spoil: Callable[[bytes, random.Random], bytes]) -> Spoil:
    """Spoil one message of a request."""

    def spoiled(request: Request, dice: random.Random) -> Request:
        at = dice.randrange(len(request))
        return [*request[:at], spoil(request[at], dice), *request[at + 1 :]]

    return spoiled


def _truncated(message: bytes, dice: random.Random) -> bytes:
    return message[: dice.randrange(len(message) + 1)]


def _flipped(message: bytes, dice: random.Random) -> bytes:
    flipped = bytearray(message)
    for _ in range(dice.choice([1, 1, 2, 8])):
        if flipped:
            flipped[dice.randrange(len(flipped))] ^= 1 << dice.randrange(8)
    return bytes(flipped)


def _inserted(message: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(message) + 1)
    return message[:at] + dice.randbytes(dice.choice([1, 4, 64])) + message[at:]


def _garbage(message: bytes, dice: random.Random) -> bytes:
    return dice.randbytes(dice.choice([1, 16, 4096]))


def _doubled(message: bytes, dice: random.Random) -> bytes:
    """Protobuf merges what comes twice: repeated fields have every element twice."""
    return message + message


def _dropped(request: Request, dice: random.Random) -> Request:
    at = dice.randrange(len(request))
    return request[:at] + request[at + 1 :]


def _repeated(request: Request, dice: random.Random) -> Request:
    at = dice.randrange(len(request))
    return [*request[: at + 1], *request[at:]]


def _reversed(request: Request, dice: random.Random) -> Request:
    return request[::-1] if len(request) > 1 else [*request, b""]


EXTREMES: dict[int, Sequence[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), -1, 0, 1, 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), -1, 0, 1, 2**53 + 1, 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: (-math.inf, -1.0, 0.0, 1e308, math.inf, math.nan),
    FieldDescriptor.CPPTYPE_FLOAT: (-math.inf, -1.0, 0.0, math.inf, math.nan),
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_ENUM: (-1, 0, 1, 2**31 - 1),
    FieldDescriptor.CPPTYPE_STRING: ("", "/", "\x00", "☃" * 1000, "x" * 70_000, "../..", "nobody"),
}


def _twisted(descriptor: Any) -> Callable[[bytes, random.Random], bytes]:
    """A well-formed message in which one field, at any depth, has an extreme value, is absent or comes twice."""

    def twisted(message: bytes, dice: random.Random) -> bytes:
        parsed = GetMessageClass(descriptor)()
        try:
            parsed.ParseFromString(message)
        except DecodeError:
            return message
        _twist(parsed, dice)
        return bytes(parsed.SerializeToString())

    return twisted


def _twist(message: Message, dice: random.Random) -> None:
    field = dice.choice(message.DESCRIPTOR.fields)
    value = getattr(message, field.name)
    nested = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
    many = hasattr(value, "__len__") and not isinstance(value, str | bytes)
    if dice.random() < 0.1:
        message.ClearField(field.name)
    elif nested and not many:
        _twist(value, dice)
    elif nested and hasattr(value, "add"):
        _twist(dice.choice(value) if len(value) and dice.random() < 0.9 else value.add(), dice)
    elif many:
        if len(value) and not hasattr(value, "keys"):
            value.append(value[0])
    elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING and isinstance(value, bytes):
        setattr(message, field.name, dice.randbytes(dice.choice([0, 1, 1000])))
    else:
        setattr(message, field.name, dice.choice(EXTREMES[field.cpp_type]))


def corruptions_of(method: MethodDescriptor) -> list[Spoil]:
    """All that can be done to a request of the method; twice as often something that stays well-formed."""
    twisted = _one(_twisted(method.input_type))
    corruptions = [
        _one(corrupt) for corrupt in (_truncated, _flipped, _inserted, _garbage, _doubled)
    ]
    if method.client_streaming:
        corruptions += [_dropped, _repeated, _reversed]
    return [*corruptions, *[twisted] * len(corruptions)]
