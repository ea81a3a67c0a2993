"""The shared nouns and the control messages as pairs of a type and its message; pictures, packed tasks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from google.protobuf import message as protobuf
from numpy.typing import NDArray

from meshrl.contract.codec.control import (
    TEXT,
    Codec,
    EnumCodec,
    Field,
    decode_array,
    decoder,
    encode_array,
    encoder,
    malformed,
    words,
)
from meshrl.contract.errors import CorruptError, UserError
from meshrl.contract.types import (
    AdamStep,
    CreateModel,
    DeadLetter,
    EngineStats,
    Ledger,
    LoadWeights,
    Media,
    Outcome,
    PackedTask,
    Pass,
    Refused,
    RunSpec,
    RunState,
    Sample,
    SamplingParams,
    SaveWeights,
    Score,
    Task,
    TrainerStatus,
    TrainingExample,
    TrainingRequest,
    TrainingResult,
    TrainingVerb,
    Uid,
    Uint8,
    UnloadModel,
    Version,
    Waiting,
)
from meshrl.v1 import queue_pb2, reward_pb2, rollout_pb2, trainer_pb2, training_pb2
from meshrl.v1 import trajectory_pb2 as pb

OUTCOMES: Final = EnumCodec(Outcome, pb.Outcome.DESCRIPTOR)


@encoder
def encode_picture(media: Media) -> pb.Media:
    """Any picture."""
    return pb.Media(kind=media.kind, sha256=media.sha256, data=media.data)


@decoder
def decode_media(messages: Iterable[pb.Media], *, names: bool = False) -> tuple[Media, ...]:
    """Pictures in order; with `names` some lack data. Raises UserError for a name that is not its data's."""
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


def _check_version(version: Version) -> None:
    if version.epoch < 0 or version.step < 0:
        malformed(f"{version} is negative")


def _check_uid(uid: Uid) -> None:
    """Refuse a uid whose text would not be read back as the same uid."""
    if not uid.run or "/" in uid.run or not uid.task or uid.index < 0 or uid.attempt < 0:
        malformed(f"{str(uid)!r} (want run/task/index.attempt)")


def _check_sampling(sampling: SamplingParams) -> None:
    """Refuse parameters under which nothing can be sampled."""
    why = sampling.fault
    if why or sampling.max_tokens < 1:
        malformed(why or f"max_tokens is {sampling.max_tokens}, want at least 1")


def _check_task(task: Task) -> None:
    if not task.run or "/" in task.run or not task.task_id:
        malformed(f"run {task.run!r}, task_id {task.task_id!r}")


def _decode_token_rewards(message: pb.Array) -> tuple[float, ...]:
    return tuple(decode_array(message, "float64", axes=1, name="token_rewards").tolist())


VERSION: Final = Codec(Version, pb.Version, check=_check_version)
UID: Final = Codec(Uid, pb.Uid, check=_check_uid)
SAMPLING: Final = Codec(SamplingParams, pb.SamplingParams, check=_check_sampling)
_MEDIA: Final = Field(
    lambda media: map(encode_picture, media),
    lambda sent: decode_media(sent) if sent else (),
)
TASK: Final = Codec(
    Task,
    pb.Task,
    check=_check_task,
    given={"media": _MEDIA},
)
RUN_SPEC: Final = Codec(RunSpec, queue_pb2.RunSpec)
RUN_STATE: Final = Codec(RunState, queue_pb2.RunState)
LEDGER: Final = Codec(Ledger, queue_pb2.Ledger)
DEAD_LETTER: Final = Codec(DeadLetter, queue_pb2.DeadLetter, given={"reason": TEXT, "prompt": TEXT})
WAITING: Final = Codec(
    Waiting, queue_pb2.Waiting, given={"who": TEXT, "what": TEXT, "owners": TEXT}
)
ENGINE_STATS: Final = Codec(EngineStats, rollout_pb2.EngineStats)
SAMPLE: Final = Codec(Sample, reward_pb2.Sample, given={"solution": TEXT})
SCORE: Final = Codec(
    Score,
    reward_pb2.Score,
    given={
        "reason": TEXT,
        "texts": TEXT,
        "token_rewards": Field(
            lambda rewards: encode_array(np.array(rewards, np.float64)), _decode_token_rewards
        ),
    },
)


def _encode_arrays(arrays: Mapping[str, NDArray[Any]]) -> dict[str, pb.Array]:
    return {name: encode_array(array) for name, array in arrays.items()}


def _decode_arrays(sent: Mapping[str, pb.Array]) -> dict[str, NDArray[Any]]:
    return {name: decode_array(array, name=name) for name, array in sent.items()}


def _encode_outputs(outputs: Iterable[Mapping[str, NDArray[Any]]]) -> list[Any]:
    return [training_pb2.TrainingOutput(values=_encode_arrays(each)) for each in outputs]


_VERBS: Final[Mapping[str, Codec[Any, Any]]] = {
    words(kind.__name__).replace(" ", "_"): Codec(
        kind, getattr(training_pb2, kind.__name__), given=given
    )
    for kind, given in {
        CreateModel: {},
        Pass: {"loss": Field(str, str)},
        AdamStep: {},
        SaveWeights: {},
        LoadWeights: {},
        UnloadModel: {},
        Refused: {"error": TEXT},
    }.items()
}
"""Codecs by the field of their message."""


def _encode_verb(verb: TrainingVerb) -> dict[str, Any]:
    name = words(type(verb).__name__).replace(" ", "_")
    return {name: _VERBS[name].encode(verb)}


def _decode_verb(message: training_pb2.TrainingRequest) -> TrainingVerb:
    name = message.WhichOneof("verb")
    if name is None:
        malformed("it has no verb")
    verb: TrainingVerb = _VERBS[name].decode(getattr(message, name))
    return verb


TRAINING_EXAMPLE: Final = Codec(
    TrainingExample,
    training_pb2.TrainingExample,
    given={"loss_inputs": Field(_encode_arrays, _decode_arrays), "media": _MEDIA},
)
TRAINING_REQUEST: Final = Codec(
    TrainingRequest,
    training_pb2.TrainingRequest,
    given={"verb": Field(_encode_verb, _decode_verb, spread=True)},
)
TRAINING_RESULT: Final = Codec(
    TrainingResult,
    training_pb2.TrainingResult,
    given={
        "outputs": Field(
            _encode_outputs, lambda sent: [_decode_arrays(each.values) for each in sent]
        ),
        "error": TEXT,
    },
)
TRAINER_STATUS: Final = Codec(TrainerStatus, trainer_pb2.TrainerStatus, given={"waiting_for": TEXT})


def pack_task(task: Task) -> PackedTask:
    """The task as bytes, those in which it came if there are any; they are decoded only when `task` is asked for.

    Raises UserError when `ground_truth` or `extra_info` is not JSON.
    """
    return PackedTask(task.packed or TASK.encode(task).SerializeToString(), unpack_task)


def unpack_task(data: bytes) -> Task:
    """The task of packed bytes. Raises CorruptError."""
    try:
        return TASK.decode(pb.Task.FromString(data))
    except (protobuf.DecodeError, UserError) as error:
        raise CorruptError(f"{len(data)} bytes are not a task: {error}") from error


def pack_training(value: TrainingRequest | TrainingResult) -> bytes:
    """A request or an answer as bytes, the same ones for the same value. Raises UserError: it does not fit."""
    chosen = TRAINING_REQUEST if isinstance(value, TrainingRequest) else TRAINING_RESULT
    message: protobuf.Message = chosen.encode(value)  # type: ignore[arg-type]
    return message.SerializeToString(deterministic=True)


def unpack_training_request(data: bytes) -> TrainingRequest:
    """The request of packed bytes. Raises UserError."""
    return TRAINING_REQUEST.decode(training_pb2.TrainingRequest.FromString(data))


def unpack_training_result(data: bytes) -> TrainingResult:
    """The answer of packed bytes. Raises UserError."""
    return TRAINING_RESULT.decode(training_pb2.TrainingResult.FromString(data))
