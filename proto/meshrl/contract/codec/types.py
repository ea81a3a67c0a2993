"""Versions, uids, tasks, and what else every service shares, to messages and back."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import DecodeError

from meshrl.contract.codec.arrays import decode_array, encode_array
from meshrl.contract.codec.checks import (
    EnumCodec,
    decoder,
    encoder,
    from_json,
    json_object,
    lossless_json,
    malformed,
    require,
)
from meshrl.contract.errors import CorruptError, UserError
from meshrl.contract.types import Message, Outcome, PackedTask, SamplingParams, Task, Uid, Version
from meshrl.v1 import trajectory_pb2 as pb

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
    return OUTCOMES.encode(outcome)


@decoder
def decode_outcome(number: int) -> Outcome:
    """Raises UserError for an unknown number, UNSPECIFIED included."""
    return OUTCOMES.decode(number)


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
    )


def encode_messages(messages: Iterable[Message]) -> list[pb.Message]:
    """In order."""
    return [pb.Message(role=m.role, content=m.content) for m in messages]


def decode_messages(messages: Iterable[pb.Message]) -> tuple[Message, ...]:
    """In order."""
    return tuple(Message(role=m.role, content=m.content) for m in messages)


@encoder
def encode_task(task: Task) -> pb.Task:
    """Raises UserError when `ground_truth` or `extra_info` is not JSON."""
    return pb.Task(
        run=task.run,
        task_id=task.task_id,
        prompt_ids=encode_array(task.prompt_ids),
        messages=encode_messages(task.messages),
        data_source=task.data_source,
        ground_truth_json=lossless_json(task.ground_truth),
        extra_info_json=lossless_json(dict(task.extra_info) or None),
        program=task.program,
        sampling=encode_sampling(task.sampling),
        group_size=task.group_size,
        deadline_s=task.deadline_s,
        priority=task.priority,
    )


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
        messages=decode_messages(message.messages),
        data_source=message.data_source,
        ground_truth=from_json(message.ground_truth_json),
        extra_info=json_object(message.extra_info_json),
        program=message.program,
        sampling=decode_sampling(message.sampling),
        group_size=message.group_size,
        deadline_s=message.deadline_s,
        priority=message.priority,
    )


def pack_task(task: Task) -> PackedTask:
    """In the bytes in which it came, if it did. Raises UserError when `ground_truth` or `extra_info` is not JSON."""
    return PackedTask(task.packed or encode_task(task).SerializeToString(), unpack_task)


def packed_task(data: bytes) -> PackedTask:
    """What `pack_task` has made of a task; nobody looks into it before its `task` is asked for."""
    return PackedTask(data, unpack_task)


def unpack_task(data: bytes) -> Task:
    """The task of packed bytes. Raises CorruptError."""
    try:
        return decode_task(pb.Task.FromString(data))
    except (DecodeError, UserError) as error:
        raise CorruptError(f"{len(data)} bytes are no task: {error}") from error
