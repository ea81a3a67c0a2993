"""Method tables and clients for operators: the queue's store and the reward registry."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from meshrl.contract.codec import LEDGER, TEXT, Codec, EnumCodec, Field, printable
from meshrl.contract.errors import CorruptError, UserError
from meshrl.contract.types import Audit, Sample, Score, StoredRun
from meshrl.rewardd.pool.signatures import FunctionKind
from meshrl.rewardd.registry.types import WATCHED, Case, Differences, Event, Name, Submission
from meshrl.rpc.clients.base import INTERACTIVE_RETRY_S, GrpcClient, row
from meshrl.rpc.credentials import MeshRole
from meshrl.rpc.methods import MethodTable, bare_row, service
from meshrl.v1 import queue_admin_pb2 as admin_pb
from meshrl.v1 import reward_registry_pb2 as registry_pb

if TYPE_CHECKING:
    from meshrl.transferqueue.store import Operation


READER, SUBMITTER = MeshRole.READER, MeshRole.SUBMITTER
AUDIT_S: Final = 3600.0
"""Seconds for an audit, which reads everything that is stored."""
SUBMIT_S: Final = 600.0
"""Loading and testing a submission have deadlines of their own in the service."""

Codec(StoredRun, admin_pb.StoredRun, given={"attached": TEXT})
Codec(
    Audit,
    admin_pb.VerifyResponse,
    given={
        "ledgers": Field(
            lambda by_run: [LEDGER.encode(ledger) for ledger in by_run.values()],
            lambda sent: {ledger.run: LEDGER.decode(ledger) for ledger in sent},
        ),
        "problems": TEXT,
    },
)

KINDS: Final = EnumCodec(
    FunctionKind, registry_pb.RewardKind.DESCRIPTOR, unspecified=FunctionKind.COMPUTE_SCORE
)
CASE: Final = Codec(Case, registry_pb.RewardCase, given={"solution": TEXT})
SUBMISSION: Final = Codec(
    Submission,
    registry_pb.SubmitRewardRequest,
    given={
        "kind": KINDS.field,
        "point": Field(lambda point: not point, lambda hold: not hold, name="hold"),
    },
)
EVENT: Final = Codec(Event, registry_pb.RewardEvent)
NAME: Final = Codec(
    Name,
    registry_pb.RewardName,
    told=("current", "versions", "retired"),
    given={
        "retired": Field(sorted),
        "history": Field(
            lambda events: map(EVENT.encode, events),
            lambda sent: tuple([EVENT.decode(each) for each in sent if each.action != WATCHED]),
        ),
    },
)


def _encode_differences(differences: Differences) -> registry_pb.RewardDifferences:
    return registry_pb.RewardDifferences(
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
            registry_pb.RewardDifference(uid=printable(u), a=a, b=b, text=printable(text))
            for _, u, a, b, text in differences.largest_first
        ],
    )


class QueueAdminTable(MethodTable, service=service(admin_pb.DESCRIPTOR, "QueueAdmin")):
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


class RewardRegistryTable(MethodTable, service=service(registry_pb.DESCRIPTOR, "RewardRegistry")):
    """meshrl.v1.RewardRegistry."""

    by_hand = (bare_row("SubmitReward", SUBMITTER, answer_s=SUBMIT_S),)

    @row("ListRewards", SUBMITTER, READER)
    async def names(self) -> registry_pb.RewardNames:
        """Every name, and what scores the run."""
        raise NotImplementedError

    @row("GetReward", SUBMITTER, READER)
    async def get(self, name: str, version: str = "") -> registry_pb.RewardVersion:
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
    ) -> registry_pb.RewardDifferences:
        """Raises NotFoundError."""
        raise NotImplementedError


class QueueAdminClient(GrpcClient, QueueAdminTable):
    """The QueueAdmin operations over gRPC."""

    def __init__(self, address: str, *, retry_s: float = INTERACTIVE_RETRY_S) -> None:
        super().__init__("queue", address, retry_s)

    async def export(self) -> AsyncGenerator[Sequence[Operation], None]:
        """Everything stored, as of one commit.

        Raises:
            UserError: the queue stores another format.
            UnavailableError: the queue went away, or sent nothing for the connection's `answer_s`.
            CorruptError: the backup ends in the middle of a value.
        """
        cut: list[bytes] = []
        messages = self._connection.stream(
            self.methods["Backup"], admin_pb.BackupRequest(), self._connection.answer_s
        )
        async with aclosing(messages):
            async for message in messages:
                yield list(_operations(message, cut))
        if cut:
            raise CorruptError(f"{self._connection.name}: the backup ends in the middle of a value")


def _operations(message: admin_pb.BackupPiece, cut: list[bytes]) -> Iterator[Operation]:
    # Imported here: every service has the table of these methods, and few the queue.
    from meshrl.transferqueue.store import FORMAT, Operation, Table

    if message.format != FORMAT:
        raise UserError(
            f"the queue stores format {message.format}, this meshrl reads format {FORMAT}: make the"
            " backup with the version that runs there"
        )
    for record in message.records:
        cut.append(record.value)
        if not record.continues:
            table = Table.PAYLOAD if record.payload else Table.META
            yield Operation(table, record.key, b"".join(cut))
            cut.clear()


SAMPLES_PER_CALL = 512


class RewardRegistryClient(GrpcClient, RewardRegistryTable):
    """Each method as in meshrl/v1/reward_registry.proto."""

    def __init__(self, address: str, *, retry_s: float = INTERACTIVE_RETRY_S) -> None:
        super().__init__("reward", address, retry_s)

    async def submit(self, submission: Submission) -> registry_pb.SubmitRewardResponse:
        """Raises UserError with what is wrong, ConflictError, CapacityError."""
        return await self._connection.call(
            self.methods["SubmitReward"],
            SUBMISSION.encode(submission),
            lambda answer: answer,
            wait_s=SUBMIT_S,
        )

    @override
    async def score(self, name: str, version: str, samples: Sequence[Sample]) -> list[Score]:
        """One Score per sample, in order. Raises NotFoundError."""
        scores: list[Score] = []
        for part in _parts(samples):
            scores += await super().score(name, version, part)
        return scores


def _parts(samples: Sequence[Sample]) -> Iterator[Sequence[Sample]]:
    for start in range(0, len(samples), SAMPLES_PER_CALL):
        yield samples[start : start + SAMPLES_PER_CALL]
