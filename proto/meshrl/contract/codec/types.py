"""Single values to messages and back: versions, uids, tasks, arrays, enums, JSON; a mistake becomes a UserError.

Arrays travel as little-endian bytes with a dtype and a shape; decoding copies nothing.
"""

from __future__ import annotations

import functools
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, Final, Generic, Never, ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf import message as protobuf

from meshrl.contract.errors import CorruptError, MeshError, UserError
from meshrl.contract.types import (
    Json,
    Media,
    Message,
    Outcome,
    PackedTask,
    SamplingParams,
    Task,
    Uid,
    Uint8,
    Version,
)
from meshrl.v1 import trajectory_pb2 as pb

P = ParamSpec("P")
R = TypeVar("R")
TypeEnum = TypeVar("TypeEnum", bound=StrEnum)
ProtoNumber = TypeVar("ProtoNumber", bound=int)
K = TypeVar("K")
V = TypeVar("V")
ProtoEnumOut = TypeVar("ProtoEnumOut", bound=int, covariant=True)

MISTAKES = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What Python, numpy, json and protobuf raise for a value that does not fit."""


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
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except MeshError:
            raise
        except MISTAKES as error:
            raise UserError(f"{problem}: {error}") from error

    return checked


def malformed(why: str) -> Never:
    """Called inside a decoder, which adds the type's name."""
    raise ValueError(why)


def require(message: protobuf.Message, *fields: str) -> None:
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


class _Table(dict[K, V]):
    """Raises ValueError for a key that it lacks; looking up the others costs no call."""

    def __init__(self, kind: str, entries: Mapping[K, V]) -> None:
        super().__init__(entries)
        self._kind = kind

    def __missing__(self, key: object) -> Never:
        malformed(f"{key!r} is no {self._kind}")


class EnumCodec(Generic[TypeEnum, ProtoNumber]):
    """One enum of the contract and its protobuf enum, whose names begin with `prefix`."""

    number_of: Mapping[TypeEnum, ProtoNumber]
    """Raises ValueError for a value that is no member."""
    member_of: Mapping[int, TypeEnum]
    """Raises ValueError for an unknown number, UNSPECIFIED included."""

    def __init__(self, kind: type[TypeEnum], enum: _ProtoEnum[ProtoNumber], prefix: str) -> None:
        numbers = {member: enum.Value(f"{prefix}_{member.name}") for member in kind}
        self.number_of = _Table(kind.__name__, numbers)
        self.member_of = _Table(kind.__name__, {int(n): member for member, n in numbers.items()})


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


OUTCOMES = EnumCodec(Outcome, pb.Outcome, "OUTCOME")


@encoder
def encode_version(version: Version) -> pb.Version:
    """Both parts from 0 on."""
    return pb.Version(epoch=version.epoch, step=version.step)


@decoder
def decode_version(message: pb.Version) -> Version:
    """Raises UserError for a negative part."""
    if message.epoch < 0 or message.step < 0:
        malformed(f"{message.epoch}.{message.step} is negative")
    return Version(message.epoch, message.step)


@encoder
def encode_uid(uid: Uid) -> pb.Uid:
    """Any uid."""
    return pb.Uid(run=uid.run, task=uid.task, index=uid.index, attempt=uid.attempt)


@decoder
def decode_uid(message: pb.Uid) -> Uid:
    """Raises UserError for a uid whose text would not be read back as the same uid."""
    uid = Uid(message.run, message.task, message.index, message.attempt)
    if not uid.run or "/" in uid.run or not uid.task or uid.index < 0 or uid.attempt < 0:
        malformed(f"{str(uid)!r} (want run/task/index.attempt)")
    return uid


def encode_uids(uids: Iterable[Uid]) -> list[pb.Uid]:
    """In order."""
    return [encode_uid(uid) for uid in uids]


def decode_uids(messages: Iterable[pb.Uid]) -> list[Uid]:
    """In order. Raises UserError."""
    return [decode_uid(message) for message in messages]


@encoder
def encode_outcome(outcome: Outcome) -> pb.Outcome.ValueType:
    """Every member has a number."""
    return OUTCOMES.number_of[outcome]


@decoder
def decode_outcome(number: int) -> Outcome:
    """Raises UserError for an unknown number, UNSPECIFIED included."""
    return OUTCOMES.member_of[number]


@encoder
def encode_sampling(sampling: SamplingParams) -> pb.SamplingParams:
    """Any sampling parameters."""
    return pb.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        seed=sampling.seed,
        greedy_siblings=sampling.greedy_siblings,
        joint_cut=sampling.joint_cut,
    )


@decoder
def decode_sampling(message: pb.SamplingParams) -> SamplingParams:
    """Raises UserError for parameters under which nothing can be sampled."""
    if not message.temperature >= 0 or not 0 < message.top_p <= 1 or message.max_tokens < 1:
        malformed(
            f"temperature {message.temperature} (want >= 0), top_p {message.top_p} (want 0 < p <= 1), "
            f"max_tokens {message.max_tokens} (want >= 1)"
        )
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        max_tokens=message.max_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        seed=message.seed,
        greedy_siblings=message.greedy_siblings,
        joint_cut=message.joint_cut,
    )


@encoder
def encode_task(task: Task) -> pb.Task:
    """Raises UserError when `ground_truth` or `extra_info` is not JSON."""
    return pb.Task(
        run=task.run,
        task_id=task.task_id,
        prompt_ids=encode_array(task.prompt_ids),
        messages=[pb.Message(role=m.role, content=m.content) for m in task.messages],
        prompt_text=task.prompt_text,
        data_source=task.data_source,
        ground_truth_json=lossless_json(task.ground_truth),
        extra_info_json=lossless_json(dict(task.extra_info) or None),
        program=task.program,
        sampling=encode_sampling(task.sampling),
        group_size=task.group_size,
        deadline_s=task.deadline_s,
        priority=task.priority,
        media=map(encode_picture, task.media),
    )


@encoder
def encode_picture(media: Media) -> pb.Media:
    """Any picture."""
    return pb.Media(kind=media.kind, sha256=media.sha256, data=media.data)


@decoder
def decode_media(messages: Iterable[pb.Media], *, names: bool = False) -> tuple[Media, ...]:
    """In order; with `names` some without data. Raises UserError for a name that is not its data's."""
    return tuple([_media(each, names=names) for each in messages])


class KnownPictures:
    """Pictures that this process has read lately: one is hashed when it comes first, and compared from then on."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._known: OrderedDict[str, Media] = OrderedDict()
        self._known_bytes = 0
        self._lock = threading.Lock()
        """Messages are taken apart in several threads."""

    def named(self, given: Media) -> Media | None:
        """The picture, in one copy for all who have it; None where its data are not those of its name."""
        with self._lock:
            known = self._known.get(given.sha256)
            if known is not None and known.data == given.data:
                self._known.move_to_end(given.sha256)
                return known
        found = Media.of(given.data)
        if found != given:
            return None
        with self._lock:
            if found.sha256 not in self._known:  # another thread may have read it meanwhile
                self._known[found.sha256] = found
                self._known_bytes += len(found.data)
            while self._known_bytes > self._most_bytes:
                self._known_bytes -= len(self._known.popitem(last=False)[1].data)
        return found


_known = KnownPictures(64 << 20)


def _media(message: pb.Media, *, names: bool) -> Media:
    media = Media(kind=message.kind, sha256=message.sha256, data=message.data)
    if media.kind != "image":
        malformed(f"media of kind {media.kind[:40]!r}, want image")
    if not media.data and not names:
        malformed(f"image {media.sha256[:64]!r} comes without its data")
    found = _known.named(media) if media.data else media
    if found is None:
        malformed(f"image {media.sha256[:64]!r} has other data than its name says")
    return found


def pack_media(media: Iterable[Media]) -> Uint8:
    """Pictures as uint8[n]."""
    packed = pb.MediaList(media=map(encode_picture, media)).SerializeToString()
    return np.frombuffer(packed, dtype=np.uint8)


def unpack_media(column: Uint8, *, names: bool = False) -> tuple[Media, ...]:
    """The inverse of `pack_media`; for `names` see `decode_media`. Raises CorruptError."""
    try:
        messages = pb.MediaList.FromString(column.tobytes()).media
        return decode_media(messages, names=names)
    except (UserError, protobuf.DecodeError) as error:
        raise CorruptError(f"malformed pictures: {error}") from error


@decoder
def decode_task(message: pb.Task) -> Task:
    """Raises UserError."""
    require(message, "prompt_ids", "sampling")
    if not message.run or "/" in message.run or not message.task_id:
        malformed(f"run {message.run!r}, task_id {message.task_id!r}")
    return Task(
        run=message.run,
        task_id=message.task_id,
        prompt_ids=decode_array(message.prompt_ids, "int32", axes=1, name="prompt_ids"),
        messages=tuple([Message(role=m.role, content=m.content) for m in message.messages]),
        prompt_text=message.prompt_text,
        data_source=message.data_source,
        ground_truth=from_json(message.ground_truth_json),
        extra_info=json_object(message.extra_info_json),
        program=message.program,
        sampling=decode_sampling(message.sampling),
        group_size=message.group_size,
        deadline_s=message.deadline_s,
        priority=message.priority,
        media=decode_media(message.media) if message.media else (),
    )


def pack_task(task: Task) -> PackedTask:
    """In the bytes in which it came, if it did; nobody looks into them before the `task` is asked for.

    Raises UserError when `ground_truth` or `extra_info` is not JSON.
    """
    return PackedTask(task.packed or encode_task(task).SerializeToString(), unpack_task)


def unpack_task(data: bytes) -> Task:
    """The task of packed bytes. Raises CorruptError."""
    try:
        return decode_task(pb.Task.FromString(data))
    except (protobuf.DecodeError, UserError) as error:
        raise CorruptError(f"{len(data)} bytes are no task: {error}") from error
