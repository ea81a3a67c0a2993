"""Shared by the codec's functions: turns mistakes into UserErrors; enums, JSON, presence of fields."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Generic, Never, ParamSpec, Protocol, TypeVar

from google.protobuf.message import Message

from meshrl.contract.errors import MeshError, UserError
from meshrl.contract.types import Json

P = ParamSpec("P")
R = TypeVar("R")
TypeEnum = TypeVar("TypeEnum", bound=StrEnum)
ProtoNumber = TypeVar("ProtoNumber", bound=int)
ProtoEnumOut = TypeVar("ProtoEnumOut", bound=int, covariant=True)

MISTAKES = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What Python, numpy, json and protobuf raise for a value that does not fit."""


def encoder(function: Callable[P, R]) -> Callable[P, R]:
    """`encode_<type>`: a value that does not fit into the message raises UserError naming the type."""
    name = function.__name__.removeprefix("encode_").replace("_", " ")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except MeshError:
            raise
        except MISTAKES as error:
            raise UserError(f"this {name} cannot be sent: {error}") from error

    return checked


def decoder(function: Callable[P, R]) -> Callable[P, R]:
    """`decode_<type>`: a message that makes no sense raises UserError naming the type."""
    name = function.__name__.removeprefix("decode_").replace("_", " ")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except MeshError:
            raise
        except MISTAKES as error:
            raise UserError(f"malformed {name}: {error}") from error

    return checked


def malformed(why: str) -> Never:
    """Called inside a decoder, which adds the type's name."""
    raise ValueError(why)


def require(message: Message, *fields: str) -> None:
    """Raises ValueError naming the first of the sub-messages `fields` that is absent."""
    for field in fields:
        if not message.HasField(field):
            malformed(f"{field} is missing")


def lossless_json(value: Json) -> str:
    """JSON text; null is the empty text. NaN and infinities are written as Python's json does."""
    return "" if value is None else json.dumps(value)


def from_json(text: str) -> Json:
    """The inverse of `lossless_json`."""
    return json.loads(text) if text else None


def json_object(text: str) -> Mapping[str, Json]:
    """A JSON object; the empty text is {}."""
    value = from_json(text)
    if value is None:
        return {}
    if not isinstance(value, dict):
        malformed(f"want a JSON object, not {type(value).__name__}")
    return value


def printable(text: str) -> str:
    """Free text, with what UTF-8 cannot encode replaced, so that no report is lost because of its reason."""
    return text.encode("utf-8", "replace").decode()


class _ProtoEnum(Protocol[ProtoEnumOut]):
    """What the generated code offers of an enum."""

    def Value(self, name: str, /) -> ProtoEnumOut: ...


class EnumCodec(Generic[TypeEnum, ProtoNumber]):
    """One enum of the contract and its protobuf enum, whose names begin with `prefix`."""

    def __init__(self, kind: type[TypeEnum], enum: _ProtoEnum[ProtoNumber], prefix: str) -> None:
        self._kind = kind
        self._to_number = {member: enum.Value(f"{prefix}_{member.name}") for member in kind}
        self._from_number = {int(number): member for member, number in self._to_number.items()}

    def encode(self, member: TypeEnum) -> ProtoNumber:
        """Raises ValueError for a value that is no member."""
        number = self._to_number.get(member)
        if number is None:
            malformed(f"{member!r} is no {self._kind.__name__}")
        return number

    def decode(self, number: int) -> TypeEnum:
        """Raises ValueError for an unknown number, UNSPECIFIED included."""
        if number not in self._from_number:
            malformed(f"{number} is no {self._kind.__name__}")
        return self._from_number[number]
