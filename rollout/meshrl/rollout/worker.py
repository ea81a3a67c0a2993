"""The rollout worker: leases tasks with free capacity, runs their programs on the engine, writes trajectories back.

    queue ──lease──▶ StageWorker ──rows──▶ program(task, engine) ──Trajectory──▶ write
      ▲               ▲                     │ running responses (generation_checkpoint.py)
      │               └── circuit breaker   │
      └───────────────append────────────────┤
                                            │ late: timeout · engine broke: infra_fault ──▶ fail (redelivered)
                                            │ engine breaks every request ──▶ release (no attempt of the row)
                                            ▼
                                         engine ◀── weights (committed by the weight plane, beside this loop)

consumes: leases of the rollout stage, of the training run and the evaluation run (the queue decides which first).
waits for: the engine's first committed version, then rows. unblocked by: the weight plane, the queue, `drain`.
produces: rollout columns, and checkpoints from which another worker can continue. In deterministic mode `slots` rows
run together in a sync batch; otherwise each runs by itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from meshrl.common import tracing
from meshrl.contract.errors import ConfigError, EngineGoneError, InfraError
from meshrl.contract.ports import Engine, Queue
from meshrl.contract.rows import (
    column_parts,
    conversation_column,
    rollout_write,
    row_media_column,
    text_column,
    times_column,
)
from meshrl.contract.stage_worker import (
    Failure,
    Intake,
    Returned,
    StageResult,
    StageStats,
    StageWorker,
    failure_of,
)
from meshrl.contract.types import (
    CONVERSATION,
    PARTS,
    ROLLOUT_STAGE,
    ROLLOUT_TIMES,
    ROW_MEDIA,
    Columns,
    GenerateDelta,
    GenerateRequest,
    LeasedRow,
    Outcome,
    Version,
)
from meshrl.rollout.circuit_breaker import CircuitBreaker, WatchedGenerator
from meshrl.rollout.config import RowSchedule
from meshrl.rollout.generation_checkpoint import GenerationCheckpointer, ResumableGenerator
from meshrl.rollout.ports import (
    NO_BREAKER,
    UNSERVED,
    Generator,
    GiveBackError,
    TogetherEngine,
    WorkerReport,
)
from meshrl.rollout.programs import ProgramCache
from meshrl.rollout.streams import ExpertRecorder, closing
from meshrl.rollout.time_slices import SleepingEngine
from meshrl.rollout.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FIRST_VERSION_CHECK_S = 0.05
"""Seconds between two checks of the engine's version before the first commit: the port has no event for it."""
FIRST_VERSION_REPORT_S = 30.0
"""How often the wait for the first version is logged."""


class RolloutWorker:
    """Serves `runs` with one started engine until drained; the caller closes the engine."""

    def __init__(
        self,
        queue: Queue,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        runs: Sequence[str],
        worker: str,
        schedule: RowSchedule,
        programs: ProgramCache | None = None,
        routed_experts: Collection[str] = (),
    ) -> None:
        """Prepare; nothing is leased before `run`.

        Args:
            queue: The queue of the runs.
            engine: Started; the caller closes it.
            tokenizer: For the programs.
            runs: Names of the runs whose rows are sampled.
            worker: This worker's name, unique among the workers of the queue.
            schedule: How many rows run at once, and how.
            programs: Started; the caller closes it. None: programs without options. Where external agents lead
                rows, as many rows are leased as agents wait: call `wake` when it are more.
            routed_experts: Runs whose rows keep the experts of their tokens.

        Raises:
            ConfigError: a deterministic schedule with an engine that cannot start requests together, or with
                external agents.
        """
        self._programs = programs or ProgramCache()
        deterministic = schedule.deterministic
        self._together = engine if isinstance(engine, TogetherEngine) else None
        if deterministic and self._together is None:
            raise ConfigError(
                f"rollout.deterministic needs an engine that starts requests together; {type(engine).__name__} "
                "does not (rollout.name=torch does)"
            )
        if deterministic and self._programs.demand is not None:
            raise ConfigError(
                "external agents come one by one, and rollout.deterministic needs sync batches: set it to false"
            )
        self._engine = engine
        self._sleeper = engine if isinstance(engine, SleepingEngine) else None
        self._routed_experts = frozenset(routed_experts)
        self._tokenizer = tokenizer
        self._name = worker
        self._draining = asyncio.Event()
        self._engine_gone = asyncio.Event()
        self._gone_reason = ""
        self._slots = schedule.slots
        self.checkpointer: GenerationCheckpointer | None = None
        checkpoint = schedule.checkpoint
        if checkpoint is not None and (checkpoint.tokens or checkpoint.ms) and not deterministic:
            self.checkpointer = GenerationCheckpointer(
                queue,
                checkpoint,
                max_staleness=schedule.max_staleness,
                lost=lambda uids: self._loop.forget(uids),
            )
        self.breaker: CircuitBreaker | None = None
        if not deterministic:
            self.breaker = CircuitBreaker(
                schedule.breaker,
                wake=lambda: self._loop.wake(),
                give_up=self._give_up,
            )
        self._loop = StageWorker(
            queue,
            runs,
            ROLLOUT_STAGE,
            self._handle,
            worker=worker,
            intake=Intake(
                limit=schedule.slots,
                per_call="batch" if deterministic else 1,
                more=self._may_lease,
                version=lambda: engine.version,
            ),
            progress=self.checkpointer,
        )

    @property
    def stats(self) -> StageStats:
        """Rows since the start."""
        return self._loop.stats

    @property
    def held(self) -> int:
        """Rows held now."""
        return self._loop.held

    def report(self) -> WorkerReport:
        """Its state now; never blocks."""
        breaker, boxes = self.breaker, self._programs.boxes
        return WorkerReport(
            held=self.held,
            slots=self._slots,
            rows=replace(self.stats),
            breaker=breaker.state if breaker else NO_BREAKER,
            error_rate=breaker.error_rate if breaker else 0.0,
            last_fault=breaker.last_fault if breaker else "",
            opened=breaker.opened if breaker else 0,
            continued=self.checkpointer.stats.continued if self.checkpointer else 0,
            draining=self._draining.is_set(),
            boxes=boxes.running if boxes else 0,
            waits_for=boxes.waits_for if boxes else "",
        )

    def drain(self) -> None:
        """Lease no more rows; `run` returns when the running ones are done, or its grace is over."""
        self._draining.set()
        self._loop.drain()

    def wake(self) -> None:
        """Lease again: the demand has grown."""
        self._loop.wake()

    async def run(
        self, *, grace_s: float = 30.0, serving: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Work until drained; rows still running `grace_s` later are released, rows with a checkpoint at once.

        `serving` returns once the engine serves a committed version; without it the engine's version is polled.

        Raises:
            InfraError: the engine has stopped. Rows that it never ran have been released.
        """
        if not await self._first_version(serving):
            return
        working = asyncio.create_task(self._loop.run(grace_s=grace_s), name="rollout-stage")
        gone = asyncio.create_task(self._engine_gone.wait(), name="rollout-engine-gone")
        beside: list[asyncio.Task[Any]] = [gone]
        if self.checkpointer is not None:
            beside.append(asyncio.create_task(self.checkpointer.run(), name="rollout-checkpoints"))
        try:
            await asyncio.wait({working, *beside}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not working.done():
                raise InfraError(f"the engine {self._gone_reason}; this worker must be restarted")
            for task in (working, *beside):
                if task.done():
                    task.result()
        finally:
            if self.breaker is not None:
                self.breaker.close()
            # The loop first: rows that it releases are saved before.
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _first_version(self, serving: Callable[[], Awaitable[None]] | None) -> bool:
        """Wait, holding no lease, until the engine serves a version; False when drained before."""
        if serving is not None:
            waits = [asyncio.ensure_future(w) for w in (serving(), self._draining.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        waited = 0.0
        while self._engine.version == UNSERVED and not self._draining.is_set():
            await asyncio.sleep(FIRST_VERSION_CHECK_S)
            waited += FIRST_VERSION_CHECK_S
            if waited >= FIRST_VERSION_REPORT_S:
                log.info("the engine waits for its first committed version")
                waited = 0.0
        return not self._draining.is_set()

    async def _handle(self, rows: Sequence[LeasedRow]) -> Sequence[StageResult]:
        if self.breaker is not None:
            return [await self._one(row, self.breaker) for row in rows]
        assert self._together is not None  # without a breaker the run is deterministic
        batch, recorded = SyncBatch(self._together, len(rows)), self._routed_experts

        async def member(index: int, row: LeasedRow) -> StageResult:
            try:
                with tracing.row_span(ROLLOUT_STAGE.name, row.uid, delivery=row.delivery):
                    generator = batch.generator(index)
                    recorder = ExpertRecorder(generator) if row.uid.run in recorded else None
                    return await self._rollout(row, recorder or generator, recorder)
            finally:
                batch.leave(index)

        # Sorted, the batch is the same in whatever order the queue delivered the rows.
        ordered = sorted(rows, key=lambda row: row.uid)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(member(i, row)) for i, row in enumerate(ordered)]
        return [task.result() for task in tasks]

    def _may_lease(self, held: int) -> int:
        """How many rows may be leased in addition to the `held` ones: by engine, boxes, breaker and demand."""
        if self._sleeper is not None and self._sleeper.asleep:
            return 0
        if self.breaker is None:  # a sync batch is complete or not leased at all
            return self._slots - held
        limit = max(1, min(self._slots, self._engine.stats().capacity))
        if (boxes := self._programs.boxes) is not None:
            limit = min(limit, boxes.most_rows)
        allowed = self.breaker.allows(held, limit)
        demand = self._programs.demand
        return allowed if demand is None else min(allowed, demand)

    async def _one(self, row: LeasedRow, breaker: CircuitBreaker) -> StageResult:
        """One row, saved while it runs; a fault that the breaker attributes to the engine is no attempt."""
        recorder = ExpertRecorder(self._engine) if row.uid.run in self._routed_experts else None
        # With each request the engine knows more about lengths, and its capacity may grow.
        watched = WatchedGenerator(recorder or self._engine, breaker, started=self._loop.wake)
        if self.checkpointer is None:
            result = await self._rollout(row, watched, recorder)
        else:
            resumable = ResumableGenerator(watched, self.checkpointer, row)
            result = await self._rollout(row, resumable, recorder)
            # Not when it was cancelled: tokens that are not saved yet stay recorded for the flush.
            self.checkpointer.end(row)
        if (
            isinstance(result, Failure)
            and result.outcome is Outcome.INFRA_FAULT
            and watched.faulted
        ):
            if breaker.spares(row.uid):
                return Returned(uid=row.uid)
            return replace(result, lasting=False)
        return result

    async def _rollout(
        self, row: LeasedRow, engine: Generator, recorder: ExpertRecorder | None = None
    ) -> StageResult:
        """One row to its end: its columns, or how it failed."""
        began = time.time()
        deadline = asyncio.timeout(row.task.deadline_s)
        sampling = row.task.sampling.of_row(row.uid.index, row.task.group_size)
        try:
            program = self._programs.get(row.task.program)
            async with deadline:
                task = row.task
                if sampling is not task.sampling:
                    task = replace(task, sampling=sampling)
                rollout = await program(task, row.uid, engine, self._tokenizer)
        except GiveBackError:
            return Returned(uid=row.uid)
        except EngineGoneError as error:
            await self._park(row, error)
        except (Exception, SystemExit) as error:
            # Programs are user code: an exception, or an exit, fails this row only.
            if deadline.expired():
                reason = f"no result within {row.task.deadline_s:g} s"
                return Failure(uid=row.uid, outcome=Outcome.TIMEOUT, reason=reason)
            log.debug("rollout of %s failed", row.uid, exc_info=error)
            return failure_of(row, error)
        if not rollout.outcome.trainable:
            reason = f"finish reason {rollout.finish_reason!r}"
            return Failure(uid=row.uid, outcome=rollout.outcome, reason=reason)
        trajectory = rollout.trajectory
        if recorder is not None:
            tokens, starts = trajectory.tokens, [0]
            if PARTS in rollout.columns:
                parts = column_parts(row.uid, rollout.columns[PARTS], len(tokens))
                starts = [part.start for part in parts]
            # Megabytes of a long row: not on the thread that all rows share.
            experts = await asyncio.to_thread(recorder.column, tokens, starts)
            trajectory = replace(trajectory, routed_experts=experts)
        written = rollout_write(
            trajectory,
            rollout.outcome,
            rollout.finish_reason,
            self._engine.version,
            task.prompt_ids,
        )
        notes: Columns = {
            "replica": text_column(self._name),
            ROLLOUT_TIMES: times_column(began, time.time()),
        }
        if rollout.messages:
            notes = {**notes, CONVERSATION: conversation_column(rollout.messages)}
        if rollout.media is not None and rollout.media != task.media:
            notes = {**notes, ROW_MEDIA: row_media_column(rollout.media, task.media)}
        return replace(written, columns={**written.columns, **notes, **rollout.columns})

    async def _park(self, row: LeasedRow, error: EngineGoneError) -> NoReturn:
        """The engine has stopped, which is no attempt of this row: hold it until `run` releases it."""
        if not self._engine_gone.is_set():
            log.error("no more rollouts on this worker, first %s: %s", row.uid, error)
            self._gone_reason = "has stopped"
            self._engine_gone.set()
        never: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()
        await never  # until `run`, woken by the event, cancels the loop

    def _give_up(self, fault: str) -> None:
        """Give up: every request fails, and a new process may work."""
        self._gone_reason = f"fails every request, the last one with: {fault}"
        self._engine_gone.set()


class SyncBatch:
    """The programs of one batch, which start together, so that their bits do not depend on when each row arrived.

    Each sends any number of requests; the next one waits until the last has begun.

    waits for: a request of every program that has not left. unblocked by: the last request, or the last program that
    leaves. produces: streams that begin at the same decode step, in order, on an otherwise idle engine.
    """

    def __init__(self, engine: TogetherEngine, size: int) -> None:
        self._engine = engine
        self._present = set(range(size))
        self._pending: dict[
            int, tuple[GenerateRequest, asyncio.Future[AsyncIterator[GenerateDelta]]]
        ] = {}

    def generator(self, index: int) -> BatchGenerator:
        """The `Generator` for program `index`."""
        return BatchGenerator(self, index)

    @property
    def version(self) -> Version:
        """The engine's."""
        return self._engine.version

    def leave(self, index: int) -> None:
        """Program `index` will send no more requests; idempotent."""
        self._present.discard(index)
        self._pending.pop(index, None)
        self._start_if_complete()

    async def begin(self, index: int, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Wait until every program that is present has a request, then start all of them."""
        started: asyncio.Future[AsyncIterator[GenerateDelta]] = (
            asyncio.get_running_loop().create_future()
        )
        self._pending[index] = (request, started)
        self._start_if_complete()
        return await started

    def _start_if_complete(self) -> None:
        if not self._pending or self._pending.keys() != self._present:
            return
        pending, self._pending = sorted(self._pending.items()), {}
        streams = self._engine.generate_together([request for _, (request, _) in pending])
        for (_, (_, started)), stream in zip(pending, streams, strict=True):
            if not started.done():
                started.set_result(stream)


class BatchGenerator:
    """A `Generator` for one program of a sync batch."""

    def __init__(self, batch: SyncBatch, index: int) -> None:
        self._batch = batch
        self._index = index
        self._one_request = asyncio.Lock()

    @property
    def version(self) -> Version:
        """The version that samples the next token."""
        return self._batch.version

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Sample one response, begun together with those of the batch's other programs."""
        async with self._one_request:
            begun = await self._batch.begin(self._index, request)
        async with closing(begun) as stream:
            async for delta in stream:
                yield delta
