"""Converts between the registry's types and their messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshrl.contract import codec
from meshrl.contract.codec.types import decoder, from_json, json_object, lossless_json, printable
from meshrl.contract.types import Sample
from meshrl.rewardd.pool.signatures import Kind
from meshrl.rewardd.registry.comparison import Differences
from meshrl.rewardd.registry.types import WATCHED, Action, Case, Event, Name, Submission
from meshrl.v1 import reward_pb2
from meshrl.v1 import reward_registry_pb2 as pb

_KINDS: Mapping[int, Kind] = {
    pb.REWARD_KIND_UNSPECIFIED: Kind.COMPUTE_SCORE,
    pb.REWARD_KIND_COMPUTE_SCORE: Kind.COMPUTE_SCORE,
    pb.REWARD_KIND_BATCH: Kind.BATCH,
    pb.REWARD_KIND_PROCESS: Kind.PROCESS,
}


def encode_kind(kind: Kind) -> pb.RewardKind.ValueType:
    """Never UNSPECIFIED."""
    return pb.RewardKind.Value(f"REWARD_KIND_{kind.name}")


@decoder
def decode_kind(kind: pb.RewardKind.ValueType) -> Kind:
    """Raises UserError."""
    if kind not in _KINDS:
        raise ValueError(f"no kind {kind}")
    return _KINDS[kind]


def encode_case(case: Case) -> pb.RewardCase:
    """To a message."""
    return pb.RewardCase(
        solution=printable(case.solution),
        score=case.score,
        ground_truth_json=lossless_json(case.ground_truth),
        data_source=case.data_source,
        extra_info_json=lossless_json(dict(case.extra_info) or None),
        tolerance=case.tolerance,
    )


@decoder
def decode_case(message: pb.RewardCase) -> Case:
    """Raises UserError."""
    return Case(
        solution=message.solution,
        score=message.score,
        ground_truth=from_json(message.ground_truth_json),
        data_source=message.data_source,
        extra_info=json_object(message.extra_info_json),
        tolerance=message.tolerance if message.HasField("tolerance") else 1e-6,
    )


def encode_submission(submission: Submission) -> pb.SubmitRewardRequest:
    """To a message."""
    return pb.SubmitRewardRequest(
        name=submission.name,
        source=submission.source,
        wheel=submission.wheel,
        entry_point=submission.entry_point,
        kind=encode_kind(submission.kind),
        deps=submission.deps,
        cases=map(encode_case, submission.cases),
        limits=submission.limits,
        note=submission.note,
        hold=not submission.point,
    )


@decoder
def decode_submission(message: pb.SubmitRewardRequest) -> Submission:
    """Raises UserError."""
    return Submission(
        name=message.name,
        source=message.source,
        wheel=message.wheel,
        entry_point=message.entry_point,
        kind=decode_kind(message.kind),
        deps=tuple(message.deps),
        cases=tuple(map(decode_case, message.cases)),
        limits=dict(message.limits),
        note=message.note,
        point=not message.hold,
    )


def encode_name(name: Name) -> pb.RewardName:
    """To a message."""
    return pb.RewardName(
        name=name.name,
        current=name.current,
        versions=name.versions,
        retired=sorted(name.retired),
        history=[
            pb.RewardEvent(action=e.action, hash=e.hash, by=e.by, at=e.at, note=e.note)
            for e in name.history
        ],
    )


@decoder
def decode_name(message: pb.RewardName) -> Name:
    """Raises UserError."""
    history = [
        Event(action=Action(e.action), hash=e.hash, by=e.by, at=e.at, note=e.note)
        for e in message.history
        if e.action != WATCHED
    ]
    return Name(name=message.name, history=tuple(history))


def encode_differences(differences: Differences) -> pb.RewardDifferences:
    """To a message."""
    return pb.RewardDifferences(
        a=differences.a,
        b=differences.b,
        rows=differences.rows,
        compared=differences.compared,
        equal=differences.equal,
        faults_a=differences.faults_a,
        faults_b=differences.faults_b,
        mean_a=differences.mean_a,
        mean_b=differences.mean_b,
        largest=[
            pb.RewardDifference(uid=printable(u), a=a, b=b, text=printable(text))
            for _, u, a, b, text in differences.largest_first
        ],
    )


def decode_samples(messages: Sequence[reward_pb2.Sample]) -> list[Sample]:
    """Raises UserError."""
    return [codec.decode_sample(message) for message in messages]
