"""The rollout worker: leases tasks with free capacity, runs their programs on the engine, writes trajectories back.

    queue ──lease──▶ StageWorker ──rows──▶ program(task, engine) ──Trajectory──▶ write
      ▲               ▲                     │ running responses (journal.py)
      │               └── gate (breaker.py) │
      └───────────────append────────────────┤
                                            │ late: timeout · engine broke: infra_fault ──▶ fail (redelivered)
                                            │ engine breaks every request ──▶ release (no attempt of the row)
                                            ▼
                                         engine ◀── weights (committed by the weight plane, beside this loop)

consumes: leases of the rollout stage, of the training run and the evaluation run (the queue decides which first).
waits for: the engine's first committed version, then rows. unblocked by: the weight plane, the queue, `drain`.
produces: rollout columns, and on the way what a successor goes on from. In deterministic mode rows come in waves of
`slots`; otherwise each runs by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from meshrl.contract.errors import ConfigError, InfraError, UnavailableError
from meshrl.contract.ports import Engine, Queue
from meshrl.contract.rows import rollout_write
from meshrl.contract.stage_worker import Failure, Returned, StageResult, StageStats, StageWorker
from meshrl.contract.types import ROLLOUT_STAGE, LeasedRow, Outcome
from meshrl.rollout.circuit_breaker import Breaker, WatchedGenerator
from meshrl.rollout.config import BreakerConfig, JournalIntervals
from meshrl.rollout.generation_checkpoint import Journal
from meshrl.rollout.ports import Generator, GiveBackError, TogetherEngine
from meshrl.rollout.programs._cache import Programs
from meshrl.rollout.resumable_generator import ResumableGenerator
from meshrl.rollout.sync_batch import SyncBatch
from meshrl.rollout.tokenizer import Tokenizer
from meshrl.rollout.versions import UNSERVED
from meshrl.rollout.worker_report import NO_BREAKER, WorkerReport

log = logging.getLogger(__name__)

FIRST_VERSION_CHECK_S = 0.05
"""Between two looks at the engine's version before the first commit: the port has no signal for it."""
FIRST_VERSION_REPORT_S = 30.0
"""How often the wait for the first version is mentioned."""


class RolloutWorker:
    """Serves `runs` with one started engine until drained; the engine stays the caller's to close."""

    def __init__(
        self,
        queue: Queue,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        runs: Sequence[str],
        worker: str,
        slots: int,
        deterministic: bool = False,
        journal: JournalIntervals | None = None,
        max_staleness: float = float("inf"),
        breaker: BreakerConfig | None = None,
        serving: Callable[[], Awaitable[None]] | None = None,
        programs: Programs | None = None,
        demand: Callable[[], int] | None = None,
    ) -> None:
        """Make a worker named `worker`, unique among those of the queue.

        `breaker` says when an engine that fails is given no rows (None: the defaults); deterministic runs have none,
        since a probe is no wave. `serving` returns once the engine serves a committed version; without it the engine
        is looked at now and then.

        `programs` are the caller's to close; None: those without options. `demand` says for how many rows somebody
        waits, where rows are leased for agents that come from outside (`wake` when it grows); None: always enough.

        `journal` says how often running responses are kept; None: never, and never in deterministic runs, where a row
        that begins anew has the same bits. Responses more than `max_staleness` versions old are not gone on with.

        Raises:
            ConfigError: `deterministic` with an engine that cannot start requests together, or with `demand`.
        """
        self._together = engine if isinstance(engine, TogetherEngine) else None
        if deterministic and self._together is None:
            raise ConfigError(
                f"rollout.deterministic needs an engine that starts requests together; {type(engine).__name__} "
                "does not (rollout.name=torch does)"
            )
        if deterministic and demand is not None:
            raise ConfigError(
                "agents from outside come one by one, and rollout.deterministic wants waves: set it to false"
            )
        self._engine = engine
        self._programs = programs or Programs()
        self._demand = demand
        self._tokenizer = tokenizer
        self._deterministic = deterministic
        self._name = worker
        self._draining = asyncio.Event()
        self._engine_gone = asyncio.Event()
        self._why_gone = ""
        self._slots = slots
        self._serving = serving
        self.journal: Journal | None = None
        if journal is not None and (journal.tokens or journal.ms) and not deterministic:
            self.journal = Journal(
                queue,
                journal,
                max_staleness=max_staleness,
                lost=lambda uids: self._loop.forget(uids),
            )
        self.breaker: Breaker | None = None
        if not deterministic:
            self.breaker = Breaker(
                breaker or BreakerConfig(), wake=lambda: self._loop.wake(), give_up=self._give_up
            )
        self._loop = StageWorker(
            queue,
            runs,
            ROLLOUT_STAGE,
            self._handle,
            worker=worker,
            limit=slots,
            sync_batch=deterministic,
            version=lambda: engine.version,
            progress=self.journal,
            concurrency_limit=self._room,
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
        """How it does now; never blocks."""
        breaker = self.breaker
        return WorkerReport(
            held=self.held,
            slots=self._slots,
            rows=replace(self.stats),
            breaker=breaker.state if breaker else NO_BREAKER,
            error_rate=breaker.error_rate if breaker else 0.0,
            last_fault=breaker.last_fault if breaker else "",
            opened=breaker.opened if breaker else 0,
            continued=self.journal.stats.continued if self.journal else 0,
            draining=self._draining.is_set(),
        )

    def drain(self) -> None:
        """Lease no more; `run` returns when what runs is done, or its grace is over."""
        self._draining.set()
        self._loop.drain()

    def wake(self) -> None:
        """The demand has grown."""
        self._loop.wake()

    async def run(self, *, grace_s: float = 30.0) -> None:
        """Work until drained; rows still running `grace_s` later are given back, those of kept responses at once.

        Raises:
            InfraError: the engine is gone. Rows that it never ran have been given back.
        """
        if not await self._first_version():
            return
        working = asyncio.create_task(self._loop.run(grace_s=grace_s), name="rollout-stage")
        gone = asyncio.create_task(self._engine_gone.wait(), name="rollout-engine-gone")
        beside: list[asyncio.Task[Any]] = [gone]
        if self.journal is not None:
            beside.append(asyncio.create_task(self.journal.run(), name="rollout-journal"))
        try:
            await asyncio.wait({working, *beside}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not working.done():
                raise InfraError(f"the engine {self._why_gone}; this worker must be started anew")
            for task in (working, *beside):
                if task.done():
                    task.result()
        finally:
            if self.breaker is not None:
                self.breaker.close()
            # The loop first: what it gives back is journaled before.
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _first_version(self) -> bool:
        """Wait, without a lease, until the engine serves; False when drained before."""
        if self._serving is not None:
            waits = [asyncio.ensure_future(w) for w in (self._serving(), self._draining.wait())]
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
        if not self._deterministic or self._together is None:
            return [await self._one(row) for row in rows]
        wave = SyncBatch(self._together, len(rows))

        async def member(index: int, row: LeasedRow) -> StageResult:
            try:
                return await self._rollout(row, wave.seat(index))
            finally:
                wave.leave(index)

        # Siblings arrive in the queue's order; sorted, the wave is the same however they were delivered.
        ordered = sorted(rows, key=lambda row: row.uid)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(member(i, row)) for i, row in enumerate(ordered)]
        return [task.result() for task in tasks]

    def _room(self, held: int) -> int:
        """Rows that may be held beyond the `held` ones: what the engine's cache has room for, while it answers."""
        if self.breaker is None:  # a wave is whole or not at all
            return self._slots - held
        limit = max(1, min(self._slots, self._engine.stats().capacity))
        room = self.breaker.allows(held, limit)
        return room if self._demand is None else min(room, self._demand())

    async def _one(self, row: LeasedRow) -> StageResult:
        """One row; a fault that says more of the engine than of the row is no attempt at it."""
        if self.breaker is None:
            return await self._journaled(row, self._engine)
        # Whatever the engine has learned of the length of rows may let more in.
        watched = WatchedGenerator(self._engine, self.breaker, asked=self._loop.wake)
        result = await self._journaled(row, watched)
        fault = isinstance(result, Failure) and result.outcome is Outcome.INFRA_FAULT
        if fault and watched.faulted and self.breaker.spares(row.uid):
            return Returned(uid=row.uid)
        return result

    async def _journaled(self, row: LeasedRow, engine: Generator) -> StageResult:
        """One row, its response kept while it runs. When cancelled, what is not kept yet stays for the flush."""
        if self.journal is None:
            return await self._rollout(row, engine)
        result = await self._rollout(row, ResumableGenerator(engine, self.journal, row))
        self.journal.drop([row.uid])
        return result

    async def _rollout(self, row: LeasedRow, engine: Generator) -> StageResult:
        """One row to its end, whatever that is."""
        deadline = asyncio.timeout(row.task.deadline_s)
        sampling = row.task.sampling.of_row(row.uid.index, row.task.group_size)
        try:
            program = self._programs.get(row.task.program)
            async with deadline:
                task = replace(row.task, sampling=sampling)
                rollout = await program(task, row.uid, engine, self._tokenizer)
        except GiveBackError:
            return Returned(uid=row.uid)
        except UnavailableError as error:
            await self._park(row, error)
        except Exception as error:
            # A program may be anybody's: what it raises is this row's fault, and nobody else's.
            if deadline.expired():
                reason = f"no result within {row.task.deadline_s:g} s"
                return Failure(uid=row.uid, outcome=Outcome.TIMEOUT, reason=reason)
            log.warning(
                "rollout of %s failed: %s", row.uid, error, exc_info=log.isEnabledFor(logging.DEBUG)
            )
            reason = f"{type(error).__name__}: {error}"
            return Failure(uid=row.uid, outcome=Outcome.INFRA_FAULT, reason=reason)
        if not rollout.outcome.trainable:
            reason = f"finish reason {rollout.finish_reason!r}"
            return Failure(uid=row.uid, outcome=rollout.outcome, reason=reason)
        trajectory = replace(rollout.trajectory, replica=self._name)
        written = rollout_write(
            trajectory, rollout.outcome, rollout.finish_reason, self._engine.version
        )
        return replace(written, columns={**written.columns, **rollout.columns})

    async def _park(self, row: LeasedRow, error: UnavailableError) -> NoReturn:
        """The engine is gone, which is no attempt at this row: hold it until `run` gives it back."""
        if not self._engine_gone.is_set():
            log.error("no more rollouts on this worker, first %s: %s", row.uid, error)
            self._why_gone = "is gone"
            self._engine_gone.set()
        never: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()
        await never  # until `run`, woken by the event, cancels the loop

    def _give_up(self, fault: str) -> None:
        """The engine answers, and every answer is a fault: a new process may do better."""
        self._why_gone = f"fails every request, the last one with: {fault}"
        self._engine_gone.set()
