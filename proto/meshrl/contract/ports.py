"""The ports: what a room may ask of another, as Protocols. Clients and in-process objects both satisfy them.

Every wait takes `wait_s` and ends with WaitTimeoutError; every write is idempotent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from typing_extensions import override

from meshrl.common.shared_buffers import Pin
from meshrl.contract.held_rows import HeldLeases
from meshrl.contract.types import (
    Batch,
    Columns,
    DeadLetter,
    EngineStats,
    GenerateDelta,
    GenerateRequest,
    Lease,
    Ledger,
    OnUpdate,
    Outcome,
    RowBlock,
    RowWrite,
    RunSpec,
    RunState,
    Sample,
    Score,
    Task,
    TrainingRequest,
    TrainingResult,
    Uid,
    Uint8,
    Version,
    Waiting,
    WeightManifest,
    blocks_of,
    pack_rows,
)


class Queue(Protocol):
    """The transfer queue. See transferqueue/README.md for the life of a row."""

    async def open_run(self, spec: RunSpec) -> RunState:
        """Declare a run; idempotent. Raises ConflictError, naming the field, if it exists with another spec.

        A spec that knows no vocabulary fits one that does, and the run's has it from then on.
        """
        ...

    async def run_state(self, run: str) -> RunState:
        """The run's spec, epoch, versions and feed. Raises NotFoundError."""
        ...

    async def acquire(self, run: str, owner: str) -> RunState:
        """Take the run over as its trainer: a new epoch; every older epoch is fenced.

        Rows that an older epoch had taken and not settled return to ready. It is taken to have died with them in
        hand: what they are in at two deaths is taken in ever smaller parts. A group is given up if several die with
        it alone in hand and make steps of others in between; see also `filter`.
        """
        ...

    async def admit(self, run: str, tasks: Sequence[Task], *, cursor: str, wait_s: float) -> int:
        """Add the longest prefix of `tasks` that admission allows, at least one; returns how many.

        `cursor` is stored in the same transaction when all of `tasks` got in; a task id that was admitted before
        counts as added and changes nothing. Waits up to `wait_s` for room, then raises WaitTimeoutError.
        """
        ...

    async def close_feed(self, run: str) -> None:
        """Declare the feed complete: no more tasks will come."""
        ...

    async def lease(
        self,
        runs: Sequence[str],
        stage: str,
        *,
        worker: str,
        limit: int,
        at_least: int = 1,
        version: Version | None = None,
        wait_s: float,
    ) -> Lease:
        """Rows of one run that this stage can work on, oldest first, siblings together.

        Answers as soon as `at_least` rows are there, or when fewer are and admission can add none (so a caller that
        asks for a fixed number gets a fixed partition of the rows). `version` is the engine's: a gated run gives
        rollout rows only to an engine at most `max_staleness` behind the published version and of its epoch.
        Raises WaitTimeoutError; EndOfDataError when every run's feed is closed and it has no resident rows.
        """
        ...

    async def renew(self, run: str, stage: str, worker: str, uids: Sequence[Uid]) -> Sequence[Uid]:
        """Extend the lease; returns the uids that the worker holds no longer."""
        ...

    async def renew_held(self, held_leases: HeldLeases) -> None:
        """Renew `held_leases` until cancelled, however busy the caller's event loop is.

        Ends with an error when renewals are refused; a queue that cannot be reached is no error.
        """
        ...

    async def write(self, run: str, stage: str, blocks: Sequence[RowBlock]) -> None:
        """Add columns to leased rows, all or none, durable on return; writing twice is writing once.

        Raises FencedError (with `uid`) when a row is leased to another worker, UserError (with `uid`) when a column
        does not belong to the stage, a shape is wrong, or a value is one that no row may have (row_values.py).
        """
        ...

    async def write_rows(
        self, run: str, stage: str, token_of: Mapping[Uid, int], rows: Sequence[RowWrite]
    ) -> None:
        """`write` for rows that are not packed yet."""
        await self.write(run, stage, pack_rows(token_of, rows))

    async def append(self, run: str, stage: str, blocks: Sequence[RowBlock]) -> None:
        """Store the progress of rows that a stage holds, durable on return; appending twice is appending once.

        The next holder of a row of this stage gets it (`LeasedRow.prefix`); the stage's write deletes it. A block
        says its `starts`; its frame has any columns, each with the same number of entries per row. Raises FencedError
        (with `uid`); ConflictError (with `uid`) when entries before `starts` are missing; UserError (with `uid`) as
        `write` does.
        """
        ...

    async def redo(self, run: str, stage: str, uids: Sequence[Uid]) -> int:
        """Have rows worked on by `stage` again: its columns go, and those of stages that read them; returns how many.

        Only rows that are resident, written by the stage and in no batch; others are passed over. No uids mean all.
        Raises UserError for a stage that samples.
        """
        ...

    async def fail(
        self,
        run: str,
        stage: str,
        uid: Uid,
        token: int,
        outcome: Outcome,
        reason: str,
        lasting: bool = False,
    ) -> None:
        """Give a leased row back: redelivered, or dead-lettered with `reason` after `max_attempts`.

        A `lasting` fault is one that another try would meet again, as far as the worker can tell: a stage that reads
        columns tries the row once more at most, if the reason stays the same. `take` ends where nothing else comes.
        """
        ...

    async def release(self, run: str, stage: str, token_of: Mapping[Uid, int]) -> None:
        """Give leased rows back untouched (a drain): the delivery does not count as an attempt."""
        ...

    async def take(
        self, run: str, *, epoch: int, step: int, groups: int, batch_id: str, wait_s: float
    ) -> Batch:
        """Exactly `groups` complete groups for optimizer step `step`.

        Fewer come only when the feed is closed, or of groups that were in hand at two deaths of a trainer. Taking
        twice with one `batch_id` is taking once. Groups older than `max_staleness` leave as stale here.
        Raises FencedError, WaitTimeoutError, EndOfDataError, ConflictError (the step is committed), UserError (rows
        die of lasting faults, and no batch will come). In a run that is not gated it waits no longer when a row has
        died and fewer groups are left.
        """
        ...

    async def fetch(
        self, run: str, blocks: Sequence[RowBlock], columns: Sequence[str]
    ) -> Sequence[RowBlock]:
        """Payload of the resident rows that `blocks` name, in the same blocks. Raises NotFoundError (with `uid`)."""
        ...

    async def fetch_rows(
        self, run: str, uids: Sequence[Uid], columns: Sequence[str]
    ) -> Sequence[Columns]:
        """`fetch` by the row, in order."""
        blocks = await self.fetch(run, blocks_of(run, uids), columns)
        return [row for block in blocks for row in block.columns()]

    async def filter(self, run: str, *, epoch: int, uids: Sequence[Uid], reason: str) -> None:
        """Taken rows leave the run untrained, counted under `reason`.

        Where the reason begins with `contract.rows.DAMAGED` or `UNTRAINABLE` they are rows that the trainer could not
        read, or not compute with: they leave as dead letters, and their groups leave the batch, too, and do what the
        run's policy says. Where it begins with `FAILED` they do so when a trainer of an earlier epoch has said the
        same of their group; the first time it is noted.
        """
        ...

    async def settle(self, run: str, *, epoch: int, step: int, batch_id: str) -> None:
        """Settle the rows of the batch: they are in optimizer step `step` (which makes version `step + 1`)."""
        ...

    async def publish(self, run: str, version: Version) -> None:
        """Publish `version`, which the fleet has committed: admission and rollout leases advance."""
        ...

    async def commit(self, run: str, *, epoch: int, step: int) -> None:
        """Commit a durable checkpoint of `step` optimizer steps: rows settled at earlier steps count as trained."""
        ...

    async def rewind(self, run: str, *, epoch: int, step: int) -> int:
        """A trainer resumed at `step`: rows that older epochs settled since are ready again; returns how many."""
        ...

    async def ledger(self, run: str) -> Ledger:
        """Exact at every instant."""
        ...

    async def dead_letters(self, run: str) -> Sequence[DeadLetter]:
        """The rows that were given up."""
        ...

    async def replay(self, run: str, uids: Sequence[Uid]) -> int:
        """Admit dead-lettered rows again as new attempts; returns how many."""
        ...

    async def why_waiting(self, run: str) -> Sequence[Waiting]:
        """Everything that blocks now, the longest wait first."""
        ...


def every_stage(stage: str) -> bool:
    """Serves any stage."""
    return True


Reserve: TypeAlias = Callable[[int], object]
"""Called with the bytes of payload that an answer is about to read; raises BusyError if they are too many."""


def unbounded(nbytes: int) -> None:
    """Let any answer be read."""


class HeartbeatQueue(Queue, Protocol):
    """The queue itself, to which workers send heartbeats."""

    @override
    async def open_run(self, spec: RunSpec, *, caller: str = "") -> RunState:
        """Raises CapacityError where `caller` has opened too many; "" may open as many as there may be."""
        ...

    @override
    async def lease(
        self,
        runs: Sequence[str],
        stage: str,
        *,
        worker: str,
        limit: int,
        at_least: int = 1,
        version: Version | None = None,
        wait_s: float,
        reserve: Reserve = unbounded,
    ) -> Lease:
        """No row is leased where `reserve` raises BusyError."""
        ...

    @override
    async def fetch(
        self,
        run: str,
        blocks: Sequence[RowBlock],
        columns: Sequence[str],
        *,
        reserve: Reserve = unbounded,
    ) -> Sequence[RowBlock]:
        """Nothing is read where `reserve` raises BusyError."""
        ...

    def heartbeat(
        self, worker: str, *, serves: Callable[[str], bool] = every_stage
    ) -> AbstractContextManager[None]:
        """`worker` is alive while the block runs; afterwards its leases end soon, unless it is heard of again.

        Its leases are those of the stages that it `serves`.
        """
        ...


class WeightSink(Protocol):
    """The engine's end of the weight plane. Nothing that serves changes before `commit_weights`."""

    async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
        """Keep a complete version beside the serving one. Raises UserError when it does not fit the model."""
        ...

    async def commit_weights(self, version: Version, on_update: OnUpdate) -> None:
        """Serve the staged version, between two decode steps. Raises NotFoundError if it is not staged."""
        ...

    async def discard_weights(self, version: Version) -> None:
        """Forget a staged version; never raises for an unknown one."""
        ...


@runtime_checkable
class LocatedSink(WeightSink, Protocol):
    """A sink whose model is in another process."""

    @property
    def where(self) -> str:
        """The process and its log, for messages."""
        ...


@runtime_checkable
class PinningSink(WeightSink, Protocol):
    """A sink whose device copies faster from page-locked memory."""

    @property
    def pin(self) -> Pin | None:
        """Locks the memory that versions arrive in; None where that gains nothing."""
        ...


@dataclass(frozen=True, slots=True)
class LentBucket:
    """Memory of a device, for one bucket, that another process may write."""

    handle: str
    """Hexadecimal handle that opens the memory in the other process."""
    nbytes: int
    """The size of the bucket."""


class DeviceReceiver(Protocol):
    """A replica's end of a channel whose bytes can arrive in memory of a device that another process has lent."""

    memory: str
    """Kind of the handles that it opens: cuda, or stub."""
    gpu: str
    """The device, by its PCI address."""

    async def settle(self) -> None:
        """Return once no receiver that was killed can write any more. Raises UnavailableError."""
        ...

    async def reach(self, bucket: LentBucket) -> None:
        """Open and close it. Raises UnavailableError where it cannot be opened."""
        ...


@runtime_checkable
class LendingSink(WeightSink, Protocol):
    """A sink that can lend a receiver device memory, so that no byte passes the host's."""

    async def lend(
        self, manifest: WeightManifest, receiver: DeviceReceiver
    ) -> Sequence[LentBucket]:
        """Memory for each bucket of a version, the same when asked again; none: it is to arrive on the host.

        It may be written until `stage_lent`, or until nobody receives. Nobody who was killed writes to what was lent
        before: the caller has waited for that (`DeviceReceiver.settle`).

        Raises:
            CapacityError: the engine was told to stage on the device, and cannot.
        """
        ...

    async def stage_lent(self, manifest: WeightManifest, digests: Sequence[str]) -> None:
        """Stage a version, as `stage_weights` does, whose verified bytes lie in the memory that was lent for it.

        Args:
            manifest: The version.
            digests: One per bucket, see `meshrl.common.chunk_digest`.
        """
        ...


@runtime_checkable
class AdapterSink(WeightSink, Protocol):
    """A sink that can take LoRA adapters as they are sent."""

    @property
    def serves_adapters(self) -> bool:
        """Whether it wants them so: `stage_weights` then gets adapters, not what they are merged into."""
        ...


class Engine(WeightSink, Protocol):
    """Streaming, token in and token out."""

    async def start(self) -> None:
        """Load the model and be ready to generate. Raises UserError for a model that cannot be served."""
        ...

    async def close(self) -> None:
        """Abort what runs and free everything; idempotent."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Sample one response; the last delta has a `finish_reason`. Closing the iterator aborts the request.

        Raises:
            EngineGoneError: it has stopped, for all requests; this process must be restarted.
        """
        ...

    @property
    def version(self) -> Version:
        """The version that samples the next token."""
        ...

    def stats(self) -> EngineStats:
        """Never blocks."""
        ...


class Training(Protocol):
    """Models that callers train by requests of their own, each model's in the order of their numbers."""

    async def submit(self, request: TrainingRequest) -> None:
        """Accept a request, durable on return; submitting it again is submitting it once.

        Numbers of a model begin with 0, its `CreateModel`; one that comes early waits for those before it. Raises
        ConflictError if another request has this number, NotFoundError for an unknown model,
        UserError for what is wrong whatever the model's state is: the number of such a request is used up, its
        result is the error. BusyError and CapacityError: nothing was done, try again later.
        """
        ...

    async def result(self, model: str, number: int, *, wait_s: float) -> TrainingResult:
        """The answer to a request, the same whenever it is asked for.

        Raises WaitTimeoutError; NotFoundError for a request that was not submitted, or was so long ago that its
        answer is gone; InfraError where the model cannot continue before a restart.
        """
        ...


class Judge(Protocol):
    """Scores samples. A sample that cannot be scored comes back with a fault, never as an exception."""

    @property
    def reward_hash(self) -> str:
        """Content hash of what scores."""
        ...

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """One Score per sample, in order, within the judge's deadline."""
        ...

    async def close(self) -> None:
        """End the judge's processes; idempotent."""
        ...


class WeightSource(Protocol):
    """The trainer's end of the weight plane: one version, frozen until released."""

    @property
    def manifest(self) -> WeightManifest:
        """The layout and hashes of the version."""
        ...

    def bucket(self, index: int) -> Uint8:
        """uint8[bucket_bytes[index]]."""
        ...


@runtime_checkable
class GatheredSource(WeightSource, Protocol):
    """A version that may be published before it is gathered: its manifest has no hashes until all of it is there."""

    async def gathered(self, index: int) -> tuple[str, Sequence[int]]:
        """Return once a bucket is there, with its hash and those of its tensors, as manifests have them.

        Raises the error with which the gather ended.
        """
        ...


class Publisher(Protocol):
    """Carries a version from a source to the whole fleet."""

    async def publish(self, source: WeightSource) -> None:
        """Hand a version over; returns once the previous one is through, or takes too long to be waited for.

        At most one is in transfer: then this one waits for its turn, and a newer one replaces it.
        """
        ...

    async def drained(self) -> None:
        """Return when nothing is in transfer."""
        ...
