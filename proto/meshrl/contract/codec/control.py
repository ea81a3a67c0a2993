"""Control messages by reflection: a frozen dataclass (or NamedTuple) and a message whose fields have equal names.

The plan of a pair is made once. Its converters follow from type hints and descriptor: enums, messages in messages,
tuples, maps, arrays, JSON (`extra_info` in a field `extra_info_json`); an absent field is None or the default. The
rest is said in a `Codec`'s arguments. Arrays travel as little-endian bytes; decoding copies nothing.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, Never, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from meshrl.contract.errors import MeshError, UserError
from meshrl.contract.types import Json
from meshrl.v1 import trajectory_pb2 as pb

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
M = TypeVar("M", bound=Message)
Member = TypeVar("Member", bound=Enum)
K = TypeVar("K")
V = TypeVar("V")

MISTAKES = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""Errors that Python, numpy, json and protobuf raise for a value that does not fit."""


def encoder(function: Callable[P, R]) -> Callable[P, R]:
    """`encode_<type>`: a value that does not fit into the message raises UserError naming the type."""
    name = function.__name__.removeprefix("encode_").replace("_", " ")
    return _checked(function, f"this {name} cannot be sent")


def decoder(function: Callable[P, R]) -> Callable[P, R]:
    """`decode_<type>`: a message that makes no sense raises UserError naming the type."""
    name = function.__name__.removeprefix("decode_").replace("_", " ")
    return _checked(function, f"malformed {name}")


def _checked(function: Callable[P, R], problem: str) -> Callable[P, R]:

    @functools.wraps(function)
    def within(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except MeshError:
            raise
        except MISTAKES as error:
            raise UserError(f"{problem}: {error}") from error

    return within


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


DTYPES: Final = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
    )
}
"""The dtypes that can be sent, by numpy's names."""
_NAMES: Final = {
    given: name for name, dtype in DTYPES.items() for given in (dtype, dtype.newbyteorder(">"))
}
MAX_AXES: Final = 8


@encoder
def encode_array(array: npt.NDArray[Any]) -> pb.Array:
    """Any array of a known dtype."""
    name = _NAMES.get(array.dtype)  # not `dtype.name`, which numpy makes anew each time
    if name is None:
        malformed(f"dtype {array.dtype.name} is none of {', '.join(DTYPES)}")
    data = np.asarray(array, DTYPES[name]).tobytes()
    return pb.Array(dtype=name, shape=array.shape, data=data)


@decoder
def decode_array(
    message: pb.Array, dtype: str = "", axes: int | None = None, name: str = ""
) -> npt.NDArray[Any]:
    """A read-only view of the message's bytes; the caller accepts `dtype` and `axes`; `name` is for errors.

    Raises:
        UserError: unknown or other dtype, impossible shape, wrong byte count.
    """
    what = f"{name}: " if name else ""
    given, shape, data = message.dtype, message.shape[:], message.data
    if given not in DTYPES:
        malformed(f"unknown dtype {given!r} (known: {', '.join(DTYPES)})")
    if len(shape) > MAX_AXES or min(shape, default=0) < 0:
        malformed(f"no array has the shape {shape}")
    wanted = math.prod(shape) * DTYPES[given].itemsize
    if len(data) != wanted:
        malformed(f"{what}{given}{shape} takes {wanted} bytes, {len(data)} were sent")
    if dtype and given != dtype:
        malformed(f"{what}want {dtype}, got {given}")
    if axes is not None and len(shape) != axes:
        malformed(f"{what}want {axes} axes, got shape {shape}")
    found = np.frombuffer(data, DTYPES[given])
    return found if len(shape) == 1 else found.reshape(shape)


class _Table(dict[K, V]):
    """Raises ValueError for a key that it lacks; looking up the others costs no call."""

    def __init__(self, kind: str, entries: Mapping[K, V]) -> None:
        super().__init__(entries)
        self._kind = kind

    def __missing__(self, key: object) -> Never:
        malformed(f"{key!r} is no {self._kind}")


class EnumCodec(Generic[Member]):
    """One enum of Python and its protobuf enum, whose names begin with what its UNSPECIFIED begins with."""

    number_of: Mapping[Member, Any]
    """Raises ValueError for a value that is no member."""
    member_of: Mapping[int, Member]
    """Raises ValueError for an unknown number; for UNSPECIFIED unless that has a meaning."""

    def __init__(
        self, kind: type[Member], enum: EnumDescriptor, unspecified: Member | None = None
    ) -> None:
        prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
        numbers = {member: enum.values_by_name[prefix + member.name].number for member in kind}
        members = {number: member for member, number in numbers.items()}
        if unspecified is not None:
            members[0] = unspecified
        self.number_of = _Table(kind.__name__, numbers)
        self.member_of = _Table(kind.__name__, members)

    @property
    def field(self) -> Field:
        """A field that holds a member."""
        return Field(self.number_of.__getitem__, self.member_of.__getitem__)


Convert = Callable[[Any], Any]


class Field(NamedTuple):
    """How one value travels; None: as it is."""

    encode: Convert | None = None
    decode: Convert | None = None
    name: str = ""
    """The message's field, if its name differs from the value's; `row.uid` is one of the message in `row`."""
    spread: bool = False
    """`encode` gives several fields of the message by name, and `decode` takes the message."""


TEXT: Final = Field()
"""Free text, in which what UTF-8 cannot encode is replaced; of a list or a map, each text."""

JSON: Final = Field(lossless_json, from_json)
JSON_OBJECT: Final = Field(lambda value: lossless_json(dict(value) or None), json_object)
_PLAIN: Final = {
    FieldDescriptor.CPPTYPE_INT32: int,
    FieldDescriptor.CPPTYPE_INT64: int,
    FieldDescriptor.CPPTYPE_UINT32: int,
    FieldDescriptor.CPPTYPE_UINT64: int,
    FieldDescriptor.CPPTYPE_DOUBLE: float,
    FieldDescriptor.CPPTYPE_FLOAT: float,
    FieldDescriptor.CPPTYPE_BOOL: bool,
}


class MessagePlan:
    """The two conversions between values by name and one message, as the code that one would write by hand.

    It is made from type hints and descriptor as `dataclasses` makes `__init__`, because every step of an interpreter
    of plans would cost as much again as the conversion of a field.
    """

    def __init__(
        self,
        kind: Callable[..., Any],
        message: type[Message],
        hints: Mapping[str, Any],
        *,
        name: str,
        parameters: Sequence[inspect.Parameter] | None = None,
        given: Mapping[str, Field] = MappingProxyType({}),
        told: Collection[str] = (),
        check: Callable[[Any], None] | None = None,
    ) -> None:
        """`encode` takes the values by `parameters`, or one object that has them as attributes.

        `name` is for errors, `hints` are the values' types; the rest is as in Codec.

        Raises:
            TypeError: a value and a field that do not fit, or one without the other.
        """
        self._known: dict[str, Any] = {
            "kind_": kind,
            "message_": message,
            "malformed_": malformed,
            "check_": check,
            "name_": name,
            "MeshError_": MeshError,
            "UserError_": UserError,
            "MISTAKES_": MISTAKES,
        }
        """Objects that the generated code refers to, by name."""
        self._message = message
        self._made = {} if kind is dict else inspect.signature(kind).parameters
        self._by_name = kind is dict or any(
            each.kind is each.KEYWORD_ONLY for each in self._made.values()
        )
        self._value = "value.@" if parameters is None else "@"
        """The code that reads a value, with @ for its name."""
        self._sent: list[str] = []
        """The code of each argument of the message."""
        self._inner: dict[str, list[str]] = {}
        """The same of the messages within it."""
        self._read: list[str] = []
        """The code of each argument of the value."""
        self._required: list[str] = []
        self._unfilled = {*message.DESCRIPTOR.fields_by_name}
        for each, hint in hints.items():
            self._add(each, hint, given.get(each, Field()))
        for each in told:
            self._unfilled.discard(each)
            encode, _ = self._own(given.get(each, Field()))
            self._sent.append(f"{each}={encode.replace('@', self._value.replace('@', each))}")
        if self._unfilled:
            names = ", ".join(sorted(self._unfilled))
            raise TypeError(f"nothing fills {names} of {message.__name__}")
        inner = [f"{outer}=dict({', '.join(parts)})" for outer, parts in self._inner.items()]
        takes = "value" if parameters is None else self._signature(parameters)
        code = [
            f"def encode({takes}):",
            *_guarded(
                f"return message_({', '.join([*self._sent, *inner])})",
                problem="this {name_} cannot be sent",
            ),
            "def decode(message):",
            *_guarded(
                *self._required,
                f"value = kind_({', '.join(self._read)})",
                *(["check_(value)"] if check is not None else []),
                "return value",
                problem="malformed {name_}",
            ),
        ]
        exec(compile("\n".join(code), f"<plan of {message.__name__}>", "exec"), self._known)
        self.encode: Callable[[Any], Any] = self._known["encode"]
        self.decode: Callable[[Any], Any] = self._known["decode"]

    def _add(self, name: str, hint: Any, own: Field) -> None:
        """Add the code of one value."""
        value, by_name = self._value.replace("@", name), f"{name}=" if self._by_name else ""
        fields: Mapping[str, Any] = self._message.DESCRIPTOR.fields_by_name
        if own.spread:
            self._sent.append(f"**{self._name(own.encode)}({value})")
            self._read.append(f"{by_name}{self._name(own.decode)}(message)")
            self._unfilled.clear()
            return
        at, part = own.name or name, "message"
        if at not in fields and f"{name}_json" in fields:
            at, own = f"{name}_json", JSON if hint is Any else JSON_OBJECT
        outer, _, at = at.rpartition(".")
        if outer:
            part, fields = f"message.{outer}", fields[outer].message_type.fields_by_name
        if at not in fields:
            raise TypeError(f"{self._message.DESCRIPTOR.full_name} has no field for {name}")
        self._unfilled.discard(outer or at)
        follows, presence = not (own.encode or own.decode), fields[at].has_presence
        bare, optional = _optional(hint)
        if optional and follows and not presence:
            raise TypeError(f"{fields[at].full_name} is never absent, {name} may be None")
        encode, decode = (
            self._field(bare, fields[at], free=own is TEXT) if follows else self._own(own)
        )
        sent, found = encode.replace("@", value), decode.replace("@", f"{part}.{at}")
        if optional and encode != "@":
            sent = f"None if {value} is None else {sent}"
        default = self._made[name].default if name in self._made else inspect.Parameter.empty
        by_default = default is not inspect.Parameter.empty and fields[at].message_type is None
        if presence and (optional or by_default):
            absent = self._name(None if optional else default)
            found = f"{found} if {part}.HasField({at!r}) else {absent}"
        elif presence:
            missing = f"{own.name or at} is missing"
            self._required.append(f"if not {part}.HasField({at!r}): malformed_({missing!r})")
        (self._inner.setdefault(outer, []) if outer else self._sent).append(f"{at}={sent}")
        self._read.append(by_name + found)

    def _name(self, constant: Any) -> str:
        name = f"_{len(self._known)}"
        self._known[name] = constant
        return name

    def _signature(self, parameters: Sequence[inspect.Parameter]) -> str:
        parts: list[str] = []
        for each in parameters:
            if each.kind is each.KEYWORD_ONLY and "*" not in parts:
                parts.append("*")
            has_default = each.default is not each.empty
            parts.append(f"{each.name}={self._name(each.default)}" if has_default else each.name)
        return ", ".join(parts)

    def _own(self, field: Field) -> tuple[str, str]:
        """The code of both converters, with @ for what they convert."""
        return (
            "@" if field.encode is None else f"{self._name(field.encode)}(@)",
            "@" if field.decode is None else f"{self._name(field.decode)}(@)",
        )

    def _field(self, hint: Any, field: FieldDescriptor, *, free: bool) -> tuple[str, str]:
        """The same of what follows from a type and a field. `free`: its text is free (`printable`)."""
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            texts = f"{{key: {self._name(printable)}(text) for key, text in @.items()}}"
            return texts if free else "@", "dict(@)"
        if not field.is_repeated:
            return self._single(hint, field, free=free)
        if not (arguments := typing.get_args(hint)):
            raise TypeError(f"{field.full_name} is repeated, {hint} is not")
        encode, decode = self._single(arguments[0], field, free=free)
        found = "@" if decode == "@" else f"[{decode.replace('@', 'each')} for each in @]"
        return (
            "@" if encode == "@" else f"[{encode.replace('@', 'each')} for each in @]",
            f"tuple({found})" if typing.get_origin(hint) is tuple else f"list({found})",
        )

    def _single(self, hint: Any, field: FieldDescriptor, *, free: bool) -> tuple[str, str]:
        if field.enum_type is not None:
            members = EnumCodec(hint, field.enum_type)
            return f"{self._name(members.number_of)}[@]", f"{self._name(members.member_of)}[@]"
        if field.message_type is None:
            wanted = _PLAIN.get(field.cpp_type) or (
                bytes if field.type == FieldDescriptor.TYPE_BYTES else str
            )
            if wanted is str and isinstance(hint, type) and issubclass(hint, StrEnum):
                return self._own(Field(None, hint))
            if hint is not wanted:
                raise TypeError(f"{field.full_name} holds {wanted.__name__}, not {hint}")
            return self._own(Field(printable if free else None))
        if typing.get_origin(hint) in (np.ndarray, npt.NDArray):
            # From numpy 2.5 on NDArray is an alias of its own, whose one argument is the scalar.
            last = typing.get_args(hint)[-1]
            [scalar] = typing.get_args(last) or [last]
            dtype = np.dtype(scalar).name
            vector = functools.partial(decode_array, dtype=dtype, axes=1, name=field.name)
            return self._own(Field(encode_array, vector))
        nested = codec_of(hint, GetMessageClass(field.message_type))
        return self._own(Field(nested.encode, nested.decode))


def _guarded(*lines: str, problem: str) -> list[str]:
    """The body of a function, of which every mistake becomes a UserError."""
    return [
        " try:",
        *(f"  {line}" for line in lines),
        " except MeshError_:",
        "  raise",
        " except MISTAKES_ as error:",
        f"  raise UserError_(f'{problem}: {{error}}') from error",
    ]


def _optional(hint: Any) -> tuple[Any, bool]:
    """A hint without its None, and whether it had one."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        [bare] = [each for each in typing.get_args(hint) if each is not type(None)]
        return bare, True
    return hint, False


_CODECS: dict[tuple[type, str], Codec[Any, Any]] = {}
"""Codecs by type and full name of its message."""


class Codec(Generic[T, M]):
    """Conversion between one type and its message."""

    def __init__(
        self,
        kind: type[T],
        message: type[M],
        *,
        check: Callable[[T], None] | None = None,
        told: Collection[str] = (),
        given: Mapping[str, Field] = MappingProxyType({}),
    ) -> None:
        """Nothing is looked up before it is used.

        Args:
            kind: A dataclass or a NamedTuple.
            message: Its message.
            check: Raises ValueError for a decoded value that makes no sense.
            told: Properties that are sent, and follow from the rest for the receiver.
            given: The converters that do not follow from the types.
        """
        self._kind = kind
        self._message = message
        self._check = check
        self._told = told
        self._given = given
        _CODECS[kind, message.DESCRIPTOR.full_name] = self

    @functools.cached_property
    def _plan(self) -> MessagePlan:
        hints = typing.get_type_hints(self._kind)
        return MessagePlan(
            self._kind,
            self._message,
            {name: hints[name] for name in inspect.signature(self._kind).parameters},
            name=words(self._kind.__name__),
            given=self._given,
            told=self._told,
            check=self._check,
        )

    @functools.cached_property
    def encode(self) -> Callable[[T], M]:
        """The message of a value. Raises UserError for one that does not fit."""
        return self._plan.encode

    @functools.cached_property
    def decode(self) -> Callable[[M], T]:
        """The value in a message. Raises UserError for one that makes no sense."""
        return self._plan.decode


def words(name: str) -> str:
    """The name of a class as words, for a message to a person."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


def codec_of(kind: type[T], message: type[M]) -> Codec[T, M]:
    """The one codec between a type and its message, made when it is first asked for."""
    known = _CODECS.get((kind, message.DESCRIPTOR.full_name))
    return known if known is not None else Codec(kind, message)
