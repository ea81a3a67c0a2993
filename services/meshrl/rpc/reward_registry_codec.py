"""The registry's types and their messages."""

from __future__ import annotations

from typing import Final

from meshrl.contract.codec import Codec, EnumCodec, Field, printable
from meshrl.rewardd.pool.signatures import Kind
from meshrl.rewardd.registry.comparison import Differences
from meshrl.rewardd.registry.types import WATCHED, Case, Event, Name, Submission
from meshrl.v1 import reward_registry_pb2 as pb

KINDS: Final = EnumCodec(Kind, pb.RewardKind.DESCRIPTOR, unspecified=Kind.COMPUTE_SCORE)
CASE: Final = Codec(Case, pb.RewardCase, text=("solution",))
SUBMISSION: Final = Codec(
    Submission,
    pb.SubmitRewardRequest,
    given={
        "kind": KINDS.field,
        "point": Field(lambda point: not point, lambda hold: not hold, name="hold"),
    },
)
EVENT: Final = Codec(Event, pb.RewardEvent)
NAME: Final = Codec(
    Name,
    pb.RewardName,
    told=("current", "versions", "retired"),
    given={
        "retired": Field(sorted),
        "history": Field(
            lambda events: map(EVENT.encode, events),
            lambda sent: tuple([EVENT.decode(each) for each in sent if each.action != WATCHED]),
        ),
    },
)


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
