"""The methods for operators: the queue's store, and the reward registry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from meshrl.contract.codec import LEDGER, TEXT, Codec, EnumCodec, Field, printable
from meshrl.contract.types import Sample, Score
from meshrl.rewardd.pool.signatures import FunctionKind
from meshrl.rewardd.registry.types import WATCHED, Case, Differences, Event, Name, Submission
from meshrl.rpc.credentials import MeshRole
from meshrl.rpc.methods import Table, bare_row, row, service
from meshrl.transferqueue.operations.audit import Audit
from meshrl.transferqueue.operations.removal import StoredRun
from meshrl.v1 import queue_admin_pb2
from meshrl.v1 import reward_registry_pb2 as pb

READER, SUBMITTER = MeshRole.READER, MeshRole.SUBMITTER
AUDIT_S: Final = 3600.0
"""Seconds for an audit, which reads everything that is stored."""
SUBMIT_S: Final = 600.0
"""Loading and testing a submission have deadlines of their own in the service."""

Codec(StoredRun, queue_admin_pb2.StoredRun, given={"attached": TEXT})
Codec(
    Audit,
    queue_admin_pb2.VerifyResponse,
    given={
        "ledgers": Field(
            lambda by_run: [LEDGER.encode(ledger) for ledger in by_run.values()],
            lambda sent: {ledger.run: LEDGER.decode(ledger) for ledger in sent},
        ),
        "problems": TEXT,
    },
)

KINDS: Final = EnumCodec(
    FunctionKind, pb.RewardKind.DESCRIPTOR, unspecified=FunctionKind.COMPUTE_SCORE
)
CASE: Final = Codec(Case, pb.RewardCase, given={"solution": TEXT})
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


def _encode_differences(differences: Differences) -> pb.RewardDifferences:
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


class QueueAdminTable(Table, service=service(queue_admin_pb2.DESCRIPTOR, "QueueAdmin")):
    """meshrl.v1.QueueAdmin."""

    by_hand = (bare_row("Backup", waits=True),)

    @row("Verify", waits=True, answer_s=AUDIT_S)
    async def verify(self) -> Audit:
        """Audit the store, and compare it with the queue's ledgers."""
        raise NotImplementedError

    @row("ListRuns", READER)
    async def runs(self) -> Sequence[StoredRun]:
        """All runs of the queue."""
        raise NotImplementedError

    @row("RemoveRun", repeatable=False)
    async def remove_run(self, run: str, *, force: bool) -> StoredRun:
        """Remove a run from the store. Where the answer is lost, the next call raises NotFoundError."""
        raise NotImplementedError


class RewardRegistryTable(Table, service=service(pb.DESCRIPTOR, "RewardRegistry")):
    """meshrl.v1.RewardRegistry."""

    by_hand = (bare_row("SubmitReward", SUBMITTER, answer_s=SUBMIT_S),)

    @row("ListRewards", SUBMITTER, READER)
    async def names(self) -> pb.RewardNames:
        """Every name, and what scores the run."""
        raise NotImplementedError

    @row("GetReward", SUBMITTER, READER)
    async def get(self, name: str, version: str = "") -> pb.RewardVersion:
        """One version with its content. Raises NotFoundError."""
        raise NotImplementedError

    @row("DiffRewards", SUBMITTER, READER)
    async def diff(self, name: str, old: str, new: str = "") -> str:
        """A unified diff. Raises NotFoundError."""
        raise NotImplementedError

    # Not repeated: without a version, twice goes back two.
    @row("RollBackReward", repeatable=False, answer_s=SUBMIT_S)
    async def roll_back(self, name: str, version: str = "") -> Name:
        """Raises NotFoundError, ConflictError."""
        raise NotImplementedError

    @row("RetireReward")
    async def retire(self, name: str, version: str) -> Name:
        """Raises NotFoundError, ConflictError."""
        raise NotImplementedError

    @row("TryReward", SUBMITTER, READER, answer_s=SUBMIT_S)
    async def score(self, name: str, version: str, samples: Sequence[Sample]) -> list[Score]:
        """One Score per sample of one message, in order. Raises NotFoundError."""
        raise NotImplementedError

    @row(
        "CompareRewards",
        SUBMITTER,
        READER,
        answer_s=SUBMIT_S,
        reply=Field(_encode_differences, lambda answer: answer),
    )
    async def compare(
        self, name: str, a: str, b: str, samples: Sequence[Sample] = ()
    ) -> pb.RewardDifferences:
        """Raises NotFoundError."""
        raise NotImplementedError
