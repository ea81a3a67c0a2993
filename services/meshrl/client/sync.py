"""The client without `await`: `with Queue.connect("127.0.0.1:7001") as queue`.

Written by services/generate_sync.py (`make sync`): change the async classes, not this file.

A connection runs an event loop in a thread of its own; any thread may call. Ctrl-C during a call cancels it and gives
back what it held. After a fork, calls raise UserError: connect in the process that uses the connection. A lease that
is lost while the block runs raises LeaseLostError at the next `write`, or at the end of the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from meshrl.client.batches import Batches as AsyncBatches
from meshrl.client.batches import Checkpoint as AsyncCheckpoint
from meshrl.client.batches import TrainBatch
from meshrl.client.connection import PATIENCE_S
from meshrl.client.leases import HeldLease as AsyncHeldLease
from meshrl.client.portal import EventLoopThread
from meshrl.client.queue import DAY_S
from meshrl.client.queue import Queue as AsyncQueue
from meshrl.client.queue import Run as AsyncRun
from meshrl.contract.codec.compression import Mode
from meshrl.contract.types import (
    DeadLetter,
    LeasedRow,
    Ledger,
    Outcome,
    RowWrite,
    RunSpec,
    RunState,
    Task,
    Uid,
    Version,
    Waiting,
)


class Batches:
    """An async iterator over a run's batches, by its one trainer. Made by `Run.batches`."""

    def __init__(self, wrapped: AsyncBatches, portal: EventLoopThread) -> None:
        self._wrapped = wrapped
        self._portal = portal

    @property
    def epoch(self) -> int:
        """The trainer's epoch; an older trainer of the run is fenced. Raises UserError before `start`."""
        return self._wrapped.epoch

    @property
    def step(self) -> int:
        """Optimizer steps settled so far, those before a resume included."""
        return self._wrapped.step

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are fetched, known after `start`."""
        return self._wrapped.columns

    def start(self) -> None:
        """Take the run over and go back to the step to resume at; done by the first iteration; idempotent.

        Raises:
            ConflictError: `step` is older than what was committed.
        """
        self._portal.call(self._wrapped.start())

    def __iter__(self) -> Self:
        """A loop that was left without settling its batch gets it once more."""
        self._wrapped.__aiter__()
        return self

    def __next__(self) -> TrainBatch:
        try:
            return self._portal.call(self._wrapped.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def settle(self) -> None:
        """The current batch went into its optimizer step. Without one: nothing.

        Raises:
            FencedError: another trainer has taken the run over.
        """
        self._portal.call(self._wrapped.settle())

    def filter(self, uids: Sequence[Uid], reason: str) -> None:
        """Rows of the current batch leave the run untrained, counted under `reason`."""
        self._portal.call(self._wrapped.filter(uids, reason))

    def checkpoint(self) -> Checkpoint:
        """A block that saves the trainer's state: settles at its start, commits at its good end."""
        return Checkpoint(self._wrapped.checkpoint(), self._portal)

    def commit(self, step: int) -> None:
        """A checkpoint with `step` optimizer steps is durable: rows settled before it are trained for good."""
        self._portal.call(self._wrapped.commit(step))


class Checkpoint:
    """`with batches.checkpoint() as step: save(step)`.

    Settling comes before the save, so that a trainer killed in between finds the rows of its checkpoint settled, and
    committing after it, so that one killed before the save finds them ready again.
    """

    def __init__(self, wrapped: AsyncCheckpoint, portal: EventLoopThread) -> None:
        self._wrapped = wrapped
        self._portal = portal

    def __enter__(self) -> int:
        """Optimizer steps that the checkpoint will hold: what `step=` takes on resume."""
        return self._portal.call(self._wrapped.__aenter__())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._portal.call(self._wrapped.__aexit__(kind, error, trace))


class HeldLease:
    """Rows of one stage, held for the length of its `with` block."""

    def __init__(self, wrapped: AsyncHeldLease, portal: EventLoopThread) -> None:
        self._wrapped = wrapped
        self._portal = portal

    @property
    def rows(self) -> tuple[LeasedRow, ...]:
        """The rows that were granted, siblings together."""
        return self._wrapped.rows

    @property
    def held(self) -> tuple[Uid, ...]:
        """The rows that are still ours and not yet written."""
        return self._wrapped.held

    def __enter__(self) -> Self:
        """Raises WaitTimeoutError; EndOfDataError when the feed is closed and no row is left."""
        self._portal.call(self._wrapped.__aenter__())
        return self

    def write(self, rows: Sequence[RowWrite]) -> tuple[Uid, ...]:
        """Write columns of leased rows; returns those that were lost and are somebody else's now.

        Raises:
            LeaseLostError: all of the lease is lost.
            UserError: a column does not belong to the stage, or a row to this lease.
        """
        return self._portal.call(self._wrapped.write(rows))

    def fail(self, uid: Uid, reason: str, *, outcome: Outcome = Outcome.INFRA_FAULT) -> None:
        """Give one row back as failed: it is tried again elsewhere, up to the run's `max_attempts`."""
        self._portal.call(self._wrapped.fail(uid, reason, outcome=outcome))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._portal.call(self._wrapped.__aexit__(kind, error, trace))


class Queue:
    """A transfer queue elsewhere. Everything written is durable on return, and writing twice is writing once."""

    def __init__(self, wrapped: AsyncQueue, portal: EventLoopThread) -> None:
        self._wrapped = wrapped
        self._portal = portal

    @classmethod
    def connect(
        cls, *addresses: str, patience_s: float = PATIENCE_S, compression: Mode = "auto"
    ) -> Self:
        """A queue to be entered: `host:port`, or those of all its shards, in the same order for everybody.

        Calls outlive a restart of the queue that takes no longer than `patience_s` seconds. Payload is compressed,
        without loss, by `compression`: `auto` between hosts, `off`, `zstd` always.

        Raises:
            UserError: no address, or none of the form.
        """
        return cls(
            AsyncQueue.connect(*addresses, patience_s=patience_s, compression=compression),
            EventLoopThread(),
        )

    def __enter__(self) -> Self:
        self._portal.call(self._wrapped.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._portal.call(self._wrapped.__aexit__(kind, error, trace))
        finally:
            self._portal.close()

    def close(self) -> None:
        """Hang up; idempotent."""
        try:
            self._portal.call(self._wrapped.close())
        finally:
            self._portal.close()

    def open_run(self, spec: RunSpec) -> Run:
        """Declare a run; idempotent. Raises ConflictError, naming the field, if it exists with another spec."""
        return Run(self._portal.call(self._wrapped.open_run(spec)), self._portal)

    def run(self, name: str) -> Run:
        """A run that somebody has opened or will open; its calls raise NotFoundError until then."""
        return Run(self._wrapped.run(name), self._portal)


class Run:
    """One run of a queue."""

    def __init__(self, wrapped: AsyncRun, portal: EventLoopThread) -> None:
        self._wrapped = wrapped
        self._portal = portal

    @property
    def name(self) -> str:
        """As in its RunSpec."""
        return self._wrapped.name

    def state(self) -> RunState:
        """Spec, epoch, published version, the feeder's cursor. Raises NotFoundError."""
        return self._portal.call(self._wrapped.state())

    def put(self, tasks: Sequence[Task], *, cursor: str = "", wait_s: float = DAY_S) -> None:
        """Admit all of `tasks`, each at the latest `wait_s` after the one before; a task put twice is there once.

        `cursor` is stored in one transaction with the last of them: where a feeder that dies goes on.

        Raises:
            WaitTimeoutError: there was no room. What got in stays in; putting the same tasks again is safe.
        """
        self._portal.call(self._wrapped.put(tasks, cursor=cursor, wait_s=wait_s))

    def close_feed(self) -> None:
        """No more tasks will come: whoever waits for rows or batches ends when the last has gone."""
        self._portal.call(self._wrapped.close_feed())

    def lease(
        self,
        stage: str,
        *,
        limit: int = 1,
        at_least: int = 1,
        worker: str = "",
        version: Version | None = None,
        wait_s: float = DAY_S,
    ) -> HeldLease:
        """Rows that `stage` can work on, held and renewed for the length of its `with` block.

        `version` is what a rollout engine samples with. `worker` names the holder (default: host and pid).
        """
        return HeldLease(
            self._wrapped.lease(
                stage, limit=limit, at_least=at_least, worker=worker, version=version, wait_s=wait_s
            ),
            self._portal,
        )

    def batches(
        self,
        groups: int,
        *,
        columns: Sequence[str] | None = None,
        step: int | None = None,
        steps: int | None = None,
        owner: str = "",
        publish: bool = True,
        wait_s: float = DAY_S,
    ) -> Batches:
        """Batches of `groups` complete groups, as the run's one trainer; fewer only in the last.

        Args:
            groups: Groups of one optimizer step.
            columns: What to fetch; all by default.
            step: Optimizer steps of the checkpoint that the trainer starts from; by default the last committed.
            steps: End after so many batches; without it when the feed is closed and empty.
            owner: Who trains, for people to read (default: host and pid).
            publish: Tell the queue with each settled step that the next version is out, which is what admission
                and rollout leases follow. False where somebody else does, when the engines have it.
            wait_s: Seconds to wait for each batch; then WaitTimeoutError.
        """
        return Batches(
            self._wrapped.batches(
                groups,
                columns=columns,
                step=step,
                steps=steps,
                owner=owner,
                publish=publish,
                wait_s=wait_s,
            ),
            self._portal,
        )

    def publish(self, version: Version) -> None:
        """The engines have `version`: admission and rollout leases move on."""
        self._portal.call(self._wrapped.publish(version))

    def ledger(self) -> Ledger:
        """Where every admitted row is; exact at every instant."""
        return self._portal.call(self._wrapped.ledger())

    def why_waiting(self) -> Sequence[Waiting]:
        """Everything that blocks now, the longest wait first."""
        return self._portal.call(self._wrapped.why_waiting())

    def dead_letters(self) -> Sequence[DeadLetter]:
        """The rows that were given up, with the last reason."""
        return self._portal.call(self._wrapped.dead_letters())

    def replay(self, uids: Sequence[Uid]) -> int:
        """Admit dead-lettered rows again as new attempts; returns how many."""
        return self._portal.call(self._wrapped.replay(uids))
