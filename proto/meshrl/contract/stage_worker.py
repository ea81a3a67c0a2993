"""The loop that every stage of the mesh runs: lease rows, work on them, write columns back.

    lease ──rows──▶ handle(rows) ──RowWrite──▶ write
      ▲                  │  ├──────Failure──▶ fail     (redelivered, dead-lettered after max_attempts)
      └── free capacity ─┘  └─────Returned──▶ release  (redelivered, no attempt counted)
    renew_held: held rows are renewed, however busy this loop is; work whose lease is lost is cancelled.
    write: the results of several calls go together (held_rows.py).

consumes: leases of one stage. waits for: rows, free capacity. unblocked by: the queue, a finished call, `wake`,
`drain`. produces: columns. A stage that dies leaves only leases behind, and those expire.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Literal, Protocol, TypeAlias

from meshrl.common import tracing
from meshrl.common.plain_text import counted
from meshrl.contract.errors import (
    AWAY,
    CorruptError,
    EndOfDataError,
    FencedError,
    InfraError,
    MeshError,
    WaitTimeoutError,
)
from meshrl.contract.held_rows import Held, HeldLeases, WriteBack
from meshrl.contract.ports import Queue
from meshrl.contract.types import Lease, LeasedRow, Outcome, RowWrite, StageSpec, Uid, Version

log = logging.getLogger(__name__)

LEASE_WAIT_S = 20.0
"""How long one call of `lease` waits; calls are repeated until `drain`."""
RELEASE_S = 10.0
"""How long giving rows back may take at the end: a queue with a full disk takes nothing, and leases expire anyway."""
TELL_LOST_S = 30.0
"""A line of lost rows is followed by the next one so long after, with those in between."""
NUMBERS = re.compile(r"\d+")
NOT_OF_ROWS = (InfraError, OSError, *AWAY)
"""Errors with which a handler would fail as well on any other rows, and maybe not the next time."""
KIND_CHARS = 200
KINDS = 16
"""Most kinds of failures that are logged, each once; all of them are counted in the queue."""
IDLE_PAUSE_S = 2.0
"""Pause between two calls to an empty queue whose feed is closed: a rewind may still bring rows back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A row that could not be worked on, with the kind of fault."""

    uid: Uid
    outcome: Outcome
    reason: str
    lasting: bool = False
    """Another try would meet the same, as far as the worker can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A row that this worker could not work on for a reason of its own: given back as if it had not been leased."""

    uid: Uid


StageResult: TypeAlias = RowWrite | Failure | Returned
Handler: TypeAlias = Callable[[Sequence[LeasedRow]], Awaitable[Sequence[StageResult]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """The rows that a stage worker takes: how many, in which portions, and for which version."""

    limit: int
    """Most rows held at once."""
    per_call: int | Literal["group", "batch"] = 1
    """Rows of a lease that one call of the handler gets; `group`: those of one group. `batch`: exactly `limit` rows
    are leased, and only when none is held, so that the same rows share a call in every execution."""
    more: Callable[[int], int] | None = None
    """Rows that may be leased besides `limit`, from the number of held rows; asked again at every `wake`."""
    version: Callable[[], Version] | None = None
    """The version of the engine that samples the rows (`Queue.lease`)."""


class Progress(Protocol):
    """Work in progress that outlives its holder (`Queue.append`)."""

    def keeps(self, uid: Uid) -> bool:
        """True for a row that its next holder can continue: a drain need not wait for it."""
        ...

    def drop(self, uids: Iterable[Uid]) -> None:
        """Forget rows that another worker holds now."""
        ...

    async def flush(self) -> None:
        """Store all progress before the rows are given back; never raises."""
        ...


@dataclass(slots=True)
class StageStats:
    """Counts of rows since the start of this loop."""

    leased: int = 0
    written: int = 0
    failed: int = 0
    returned: int = 0
    lost: int = 0


@dataclass(slots=True, eq=False)
class _Call:
    """One running `handle`: its task and the rows it holds."""

    rows: dict[Uid, LeasedRow]
    task: asyncio.Task[None] | None = None
    done: bool = False
    """The work is done and its results are on their way to the queue."""


class StageWorker:
    """Works on rows of `runs` until drained."""

    lease_wait_s = LEASE_WAIT_S
    """How long one call of `lease` waits."""
    release_s = RELEASE_S
    """Most time that giving rows back takes at the end."""

    def __init__(
        self,
        queue: Queue,
        runs: Sequence[str],
        stage: StageSpec,
        handle: Handler,
        *,
        worker: str,
        intake: Intake,
        progress: Progress | None = None,
    ) -> None:
        self.stats = StageStats()
        self._warned: set[str] = set()
        self._lost_untold = 0
        self._tell_lost_at = 0.0
        self._queue = queue
        self._runs = tuple(runs)
        self._stage = stage
        self._handle = handle
        self._worker = worker
        self._intake = intake
        self._sync_batch = intake.per_call == "batch"
        self._progress = progress
        self._calls: set[_Call] = set()
        self._held = 0
        """Rows of calls that work."""
        self._returning = 0
        """Rows of calls that are done."""
        self._write_back = {
            run: WriteBack(queue, run, stage.name, alone=lambda: not self.held)
            for run in self._runs
        }
        self._freed = asyncio.Event()
        self._draining = asyncio.Event()
        self._broken: BaseException | None = None
        self._held_leases = HeldLeases(stage.name, worker, self._lost)

    @property
    def held(self) -> int:
        """Rows worked on now; results on their way back do not count."""
        return self._held

    def drain(self) -> None:
        """Lease no more; `run` returns when the calls in flight are done."""
        self._draining.set()
        self._freed.set()

    def wake(self) -> None:
        """Wake the intake: more rows may be leased than at the last call of `Intake.more`."""
        self._freed.set()

    async def run(self, *, grace_s: float = 30.0) -> None:
        """Work until drained; calls still running `grace_s` after that are cancelled, their rows released.

        It does not wait for calls whose rows the next holder can continue.
        """
        renewer = asyncio.create_task(
            self._queue.renew_held(self._held_leases), name=f"{self._stage.name}-renew"
        )
        feeder = asyncio.create_task(self._lease_and_start(), name=f"{self._stage.name}-lease")
        try:
            await asyncio.wait({renewer, feeder}, return_when=asyncio.FIRST_COMPLETED)
            for task in (renewer, feeder):
                if task.done():
                    task.result()
            await self._finish(grace_s)
        finally:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)
            try:
                await self._release_all()
            finally:
                renewer.cancel()
                await asyncio.gather(renewer, return_exceptions=True)
        if self._broken is not None:
            raise self._broken

    async def _finish(self, grace_s: float) -> None:
        """Wait for running calls, except for those that the next holder can continue."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + grace_s
        while running := [c.task for c in self._calls if c.task and not self._movable(c)]:
            done, _ = await asyncio.wait(running, timeout=max(0.0, deadline - clock()))
            if len(done) < len(running):
                return

    def _movable(self, call: _Call) -> bool:
        return self._progress is not None and all(map(self._progress.keeps, call.rows))

    async def _lease_and_start(self) -> None:
        while not self._draining.is_set():
            free = await self._capacity()
            lease = await self._lease(free) if free else None
            if lease is None:
                continue
            readable = await self._readable(lease)
            let_in = (
                len(readable) if self._intake.more is None else max(0, self._intake.more(self.held))
            )
            rows, surplus = readable[:let_in], readable[let_in:]
            # A row that is worked on here already was taken back meanwhile, without notice so far.
            cancelled = self.forget({row.uid for row in rows}) if self._calls else {}
            self._held_leases.add(rows, lease.ttl_s)
            self.stats.leased += len(rows)
            for part in self._parts(rows):
                call = _Call(rows={row.uid: row for row in part})
                self._calls.add(call)
                self._held += len(part)
                after = {cancelled[uid] for uid in call.rows if uid in cancelled}
                work = self._work(call, after)
                call.task = asyncio.create_task(work, name=f"{self._stage.name}-call")
                call.task.add_done_callback(partial(self._finished, call))
            if surplus:  # the limit fell while they were on their way
                await self._release(surplus)

    def _parts(self, rows: Sequence[LeasedRow]) -> Iterator[Sequence[LeasedRow]]:
        """The rows of each call."""
        per_call = self._intake.per_call
        if per_call == "group":
            for _, group in groupby(rows, key=lambda row: row.uid.task):
                yield tuple(group)
            return
        size = self._intake.limit if per_call == "batch" else per_call
        for start in range(0, len(rows), size):
            yield rows[start : start + size]

    async def _capacity(self) -> int:
        """Rows that may be leased now; waits for a finished call or `wake` (or `drain`, then 0)."""
        while not self._draining.is_set():
            # While the queue takes no results, at most one more `limit` of rows may be worked on.
            limit = self._intake.limit
            free = min(limit, 2 * limit - self._returning) - self.held
            if self._intake.more is not None:
                free = min(free, self._intake.more(self.held))
            if free > 0 and not (self._sync_batch and self._calls):
                return free
            self._freed.clear()
            await self._freed.wait()
        return 0

    async def _lease(self, free: int) -> Lease | None:
        asking = asyncio.ensure_future(
            self._queue.lease(
                self._runs,
                self._stage.name,
                worker=self._worker,
                limit=free,
                at_least=self._intake.limit if self._sync_batch else 1,
                version=self._intake.version() if self._intake.version else None,
                wait_s=self.lease_wait_s,
            )
        )
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            await asyncio.wait({asking, draining}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return None
            return asking.result()
        except WaitTimeoutError:
            return None
        except EndOfDataError:
            await asyncio.wait({draining}, timeout=IDLE_PAUSE_S)
            return None
        finally:
            asking.cancel()
            draining.cancel()
            await asyncio.gather(asking, draining, return_exceptions=True)

    async def _readable(self, lease: Lease) -> list[LeasedRow]:
        """Its rows. Those of a block whose payload is damaged fail, and keep no others from being worked on."""
        rows: list[LeasedRow] = []
        for block in lease.blocks:
            try:
                rows += block.rows()
            except CorruptError as error:
                for uid in block.uids(lease.run):
                    failure = Failure(
                        uid=uid, outcome=Outcome.INFRA_FAULT, reason=f"damaged: {error.message}"
                    )
                    await self._fail(failure, block.token)
        return rows

    async def _work(self, call: _Call, after: Collection[asyncio.Task[None]]) -> None:
        if after:  # what they clean up may belong to the row, such as the state of its tools
            await asyncio.wait(after, timeout=self.release_s)
        rows = list(call.rows.values())
        results: Sequence[StageResult]
        try:
            results = await self._traced(rows)
        except (Exception, SystemExit) as error:
            # A crash of the handler, or its exit, is an infrastructure fault: the rows are tried again elsewhere.
            log.exception("%s: handler failed on %s", self._stage.name, rows[0].uid)
            results = [failure_of(row, error) for row in rows]
            if len(rows) > 1 and not self._sync_batch and not isinstance(error, NOT_OF_ROWS):
                # One may be what it failed on, and would fail the others of each call that it is in.
                results = [await self._alone(row) for row in rows]
        call.done = True
        if call in self._calls:
            self._held -= len(rows)
            self._returning += len(rows)
        self._freed.set()
        began = time.time_ns()
        await self._give_back(call, results)
        if tracing.is_on():
            tracing.record_rows("write", call.rows, began, stage=self._stage.name)

    async def _alone(self, row: LeasedRow) -> StageResult:
        try:
            (result,) = await self._traced([row])
        except (Exception, SystemExit) as error:
            return failure_of(row, error)
        return result

    async def _traced(self, rows: Sequence[LeasedRow]) -> Sequence[StageResult]:
        """Handle rows: in the span of a row that is alone; of several, a span of each is recorded.

        The rows of a sync batch run side by side in their handler, which opens their spans.
        """
        name = self._stage.name
        if not tracing.is_on() or self._sync_batch:
            return await self._handle(rows)
        if len(rows) == 1:
            with tracing.row_span(name, rows[0].uid, delivery=rows[0].delivery):
                return await self._handle(rows)
        began = time.time_ns()
        results = await self._handle(rows)
        tracing.record_rows(name, (row.uid for row in rows), began, rows=len(rows))
        return results

    def _count_lost(self, rows: int, how: str) -> None:
        """Log rows that left this worker, seldom: when one of a group is dead-lettered, all others leave."""
        self.stats.lost += rows
        self._lost_untold += rows
        if time.monotonic() >= self._tell_lost_at:
            what = counted(self._lost_untold, "row")
            log.warning("%s: %s lost, the last one: %s", self._stage.name, what, how)
            self._lost_untold, self._tell_lost_at = 0, time.monotonic() + TELL_LOST_S

    def _discard(self, call: _Call) -> None:
        """Idempotent."""
        if call not in self._calls:
            return
        self._calls.remove(call)
        if call.done:
            self._returning -= len(call.rows)
        else:
            self._held -= len(call.rows)

    def _finished(self, call: _Call, task: asyncio.Task[None]) -> None:
        self._discard(call)
        self._held_leases.drop(call.rows.values())
        self._freed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            # The queue cannot be reached or refuses this worker: `run` raises the error.
            self._broken = self._broken or error
            self.drain()

    async def _give_back(self, call: _Call, results: Sequence[StageResult]) -> None:
        failures = [r for r in results if isinstance(r, Failure)]
        writes = [r for r in results if isinstance(r, RowWrite)]
        returned = [call.rows[r.uid] for r in results if isinstance(r, Returned)]
        run = next(iter(call.rows)).run
        if writes:
            tokens = {row.uid: call.rows[row.uid].token for row in writes}
            refused = await self._write_back[run].write(tokens, writes)
            self.stats.written += len(writes) - len(refused)
            for uid, error in refused.items():
                if isinstance(error, FencedError):
                    self._count_lost(1, f"a result is no longer wanted: {error}")
                else:  # the row itself is wrong, so it would be refused again
                    reason = str(error)
                    fault = Outcome.INFRA_FAULT
                    failures.append(Failure(uid=uid, outcome=fault, reason=reason, lasting=True))
        for failure in failures:
            await self._fail(failure, call.rows[failure.uid].token)
        if returned:
            await self._release(returned)

    async def _fail(self, failure: Failure, token: int) -> None:
        uid = failure.uid
        self.stats.failed += 1
        self._warn(failure)
        try:
            await self._queue.fail(
                uid.run,
                self._stage.name,
                uid,
                token,
                failure.outcome,
                failure.reason,
                failure.lasting,
            )
        except FencedError:
            self.stats.lost += 1

    def _warn(self, failure: Failure) -> None:
        """Log the first failure of each kind: a fault that fails every row is seen before they are given up."""
        # Numbers differ between rows that fail alike.
        kind = NUMBERS.sub("0", failure.reason)[:KIND_CHARS]
        if kind in self._warned or len(self._warned) >= KINDS:
            return
        self._warned.add(kind)
        log.warning(
            "%s: row %s failed, %s: %s (the first of its kind)",
            self._stage.name,
            failure.uid,
            failure.outcome.value,
            failure.reason,
        )

    async def _release(self, rows: Sequence[LeasedRow]) -> None:
        """Give rows back as if they had not been leased."""
        self.stats.returned += len(rows)
        tokens = {row.uid: row.token for row in rows}
        await self._queue.release(rows[0].uid.run, self._stage.name, tokens)

    def _lost(self, rows: Held) -> None:
        self.forget(set(self._held_leases.still(rows)))

    def forget(self, lost: set[Uid]) -> Mapping[Uid, asyncio.Task[None]]:
        """Cancel calls that hold none of their rows any more; returns the cancelled tasks by row.

        A row whose result is being written may be lost because the write has arrived.
        """
        if self._progress is not None:
            self._progress.drop(lost)
        cancelled: dict[Uid, asyncio.Task[None]] = {}
        for call in list(self._calls):
            if not call.done and call.rows.keys() <= lost:
                self._count_lost(len(call.rows), f"the lease on {next(iter(call.rows))} ended")
                self._discard(call)
                if call.task:
                    call.task.cancel()
                    cancelled.update(dict.fromkeys(call.rows, call.task))
                self._freed.set()
        return cancelled

    async def _release_all(self) -> None:
        """Cancel running calls and give their rows back, so that no one waits for their leases to expire."""
        calls, self._calls = list(self._calls), set()
        self._held = self._returning = 0
        for call in calls:
            if call.task:
                call.task.cancel()
        await asyncio.gather(*(c.task for c in calls if c.task), return_exceptions=True)
        if self._progress is not None:
            await self._progress.flush()
        give_up_at = asyncio.get_running_loop().time() + self.release_s
        for call in calls:
            tokens = {uid: row.token for uid, row in call.rows.items()}
            try:
                async with asyncio.timeout_at(give_up_at):
                    await self._queue.release(next(iter(tokens)).run, self._stage.name, tokens)
            except (MeshError, TimeoutError) as error:
                log.warning(
                    "%s: rows not released, their leases will expire: %r", self._stage.name, error
                )


def failure_of(row: LeasedRow, error: BaseException) -> Failure:
    """How a row failed whose work raised `error`."""
    reason = f"{type(error).__name__}: {error}"
    may_pass = isinstance(error, NOT_OF_ROWS) or (isinstance(error, MeshError) and error.retryable)
    return Failure(uid=row.uid, outcome=Outcome.INFRA_FAULT, reason=reason, lasting=not may_pass)
