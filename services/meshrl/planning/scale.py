"""A whole fleet in virtual time: the real queue, called without codec and network, among paced engines, one trainer.

    feeder ──admit──▶ queue ──lease──▶ worker 0 … N-1 ──write──▶ queue ──take──▶ trainer ──▶ versions, to every worker

Admission, leases, fair shares, staleness and batches are the product's. A worker is a slot count and an engine whose
requests share its speed; a step, a transfer, a reward and a tool call are spans of time. Each call of the queue takes
its measured processor time, one call after the other. So a thousand workers need seconds, and one seed is one result.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np

from meshrl.contract.errors import FencedError, WaitTimeoutError
from meshrl.contract.frames import Frame, pack
from meshrl.contract.types import (
    ROLLOUT_STAGE,
    LeasedBlock,
    OnUpdate,
    Outcome,
    RowBlock,
    RowFacts,
    RunSpec,
    SamplingParams,
    Task,
    Version,
)
from meshrl.planning.loop import START_S, VirtualLoop, quiet
from meshrl.planning.setting import PacedGpu, Processor, Setting
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

RUN: Final = "plan"
WAIT_S: Final = 20.0
"""How long one lease waits, as in the product's stage worker."""
LONG_WAIT_S: Final = 3600.0
"""How long it waits here, at the price of as many calls: thousands of idle workers ask in vain every WAIT_S."""
SHORT_TOKENS: Final = 16
"""Stored tokens of a mean row: the queue stores and compares lengths, so they are scaled, not left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The result of a setting, from the end of the warm-up on."""

    samples_per_h: float
    tokens_per_s: float
    staleness_mean: float
    staleness_p99: int
    staleness: dict[int, float]
    """Steps between sampling and training, to their share of the rows."""
    trainer_idle: float
    """Share of the time in which the trainer waits for rows or for a transfer."""
    publish_wait: float
    """Share of the time in which it waits for the transfer before."""
    rollout_idle: float
    """Share of the tokens that the fleet could sample and does not."""
    queue_load: float
    """Share of the time in which the queue's processor is busy."""
    steps: int
    with_warm_up_s: float


@dataclass(slots=True, eq=False)
class _Row:
    """One row in a slot."""

    block: LeasedBlock
    position: int
    tokens: int
    turns_left: int
    oldest: Version


class _Worker:
    """Leases for its free slots, samples, and writes what is finished together."""

    def __init__(self, number: int, mesh: _SimulatedMesh) -> None:
        self.name = f"rollout-{number}"
        self.version = mesh.committed
        setting = mesh.setting
        self.gpu = PacedGpu(
            slots=setting.slots,
            tokens_per_s=setting.tokens_per_s,
            alone_speedup=setting.alone_speedup,
        )
        self._mesh = mesh
        self._taken = 0
        self._renewed_at = 0.0
        """Renewals are counted up to then, while it holds rows."""
        self._rows: set[_Row] = set()
        self._waiting: deque[_Row] = deque()
        """Leased while an update drains the engine."""
        self._updating = False
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._finished: list[_Row] = []
        self._written = asyncio.Event()
        self._tools = random.Random(f"{mesh.setting.seed} tools {number}")
        self._failures = random.Random(f"{mesh.setting.seed} failures {number}")

    async def live(self) -> None:
        """Work; after a failure, begin again with nothing."""
        setting, rate = self._mesh.setting, self._mesh.setting.failures_per_h / 3600
        while True:
            with self._mesh.queue.heartbeat(self.name):
                async with asyncio.TaskGroup() as tasks:
                    work = [tasks.create_task(self._lease()), tasks.create_task(self._write())]
                    if rate:
                        await asyncio.sleep(self._failures.expovariate(rate))
                        for task in work:
                            task.cancel()
            self._forget()
            await asyncio.sleep(setting.restart_s)
            self.version = self._mesh.committed

    async def update(self, version: Version) -> None:
        """Serve `version`, in the way that the recipe says."""
        setting = self._mesh.setting
        if setting.on_update is OnUpdate.DRAIN and self._rows:
            self._updating = True
            self._idle.clear()
            await self._idle.wait()
        if setting.commit_s:
            self.gpu.pause(True)
            await asyncio.sleep(setting.commit_s)
            self.gpu.pause(False)
        self.version = version
        self._updating = False
        while self._waiting:
            self._start(self._waiting.popleft())
        self._changed.set()

    def renew(self) -> None:
        """Charge the queue for the renewals of what is held since the last call, as one piece of work."""
        now = self._mesh.loop.time()
        if self._taken:
            renewals = (now - self._renewed_at) * self._mesh.setting.renewals_per_s
            self._mesh.processor.charge(calls=renewals)
        self._renewed_at = now

    def _forget(self) -> None:
        self.renew()
        self.gpu.stop()
        self._rows.clear()
        self._waiting.clear()
        self._finished.clear()
        self._taken = 0
        self._idle.set()

    async def _lease(self) -> None:
        mesh, setting = self._mesh, self._mesh.setting
        while True:
            free = setting.slots - self._taken
            if not free:
                self._changed.clear()
                await self._changed.wait()
                continue
            await mesh.processor.spend()
            asked = mesh.loop.time()
            try:
                lease = await mesh.queue.lease(
                    [RUN],
                    ROLLOUT_STAGE.name,
                    worker=self.name,
                    limit=free,
                    version=self.version,
                    wait_s=LONG_WAIT_S,
                )
            except WaitTimeoutError:
                mesh.processor.charge_spread((mesh.loop.time() - asked) // WAIT_S)
                if self._behind():
                    self._changed.clear()
                    await self._changed.wait()
                continue
            mesh.processor.charge_spread((mesh.loop.time() - asked) // WAIT_S)
            mesh.processor.charge(calls=0, rows=lease.num_rows)
            self.renew()
            self._taken += lease.num_rows
            for block in lease.blocks:
                task = int(block.task)
                for position, index in enumerate(block.indices):
                    attempt = block.attempts[position]
                    tokens = setting.lengths.draw(setting.seed, task, index, attempt)
                    row = _Row(block, position, tokens, setting.tool_calls, self.version)
                    if self._updating:
                        self._waiting.append(row)
                    else:
                        self._start(row)

    def _behind(self) -> bool:
        """The version is too old for a lease: only an update helps."""
        return self._mesh.published.step - self.version.step > self._mesh.setting.max_staleness

    def _start(self, row: _Row) -> None:
        row.oldest = self.version
        self._rows.add(row)
        self._turn(row)

    def _turn(self, row: _Row) -> None:
        if row in self._rows:
            share = row.tokens / (self._mesh.setting.tool_calls + 1)
            self.gpu.sample(share, lambda: self._turned(row))

    def _turned(self, row: _Row) -> None:
        if row.turns_left:
            row.turns_left -= 1
            mean = self._mesh.setting.tool_s
            pause = self._tools.expovariate(1 / mean) if mean else 0.0
            self._mesh.loop.call_later(pause, self._turn, row)
            return
        self._rows.discard(row)
        self.renew()
        self._taken -= 1
        self._changed.set()
        self._finished.append(row)
        self._written.set()
        if not self._rows:
            self._idle.set()

    async def _write(self) -> None:
        mesh = self._mesh
        while True:
            await self._written.wait()
            self._written.clear()
            rows, self._finished = self._finished, []
            by_grant: dict[tuple[str, int], list[_Row]] = {}
            for row in rows:
                by_grant.setdefault((row.block.task, row.block.token), []).append(row)
            await mesh.processor.spend(rows=len(rows))
            blocks = [self._packed(held) for held in by_grant.values()]
            with suppress(FencedError):
                if mesh.setting.reward_s:
                    mesh.beside(self._write_later(blocks))
                else:
                    await mesh.queue.write(RUN, ROLLOUT_STAGE.name, blocks)
            # The other stages: a lease and a write each, whose rows come together as these did.
            stages = mesh.setting.stages
            mesh.processor.charge(calls=2 * stages, rows=2 * stages * len(rows))

    async def _write_later(self, blocks: list[RowBlock]) -> None:
        await asyncio.sleep(self._mesh.setting.reward_s)
        with suppress(FencedError):
            await self._mesh.queue.write(RUN, ROLLOUT_STAGE.name, blocks)

    def _packed(self, rows: list[_Row]) -> RowBlock:
        block, mean = rows[0].block, self._mesh.setting.lengths.mean
        stored = tuple([max(1, round(SHORT_TOKENS * row.tokens / mean)) for row in rows])
        facts = [
            RowFacts(Outcome.OK, length, row.oldest, max(row.oldest, self.version))
            for row, length in zip(rows, stored, strict=True)
        ]
        return RowBlock(
            task=block.task,
            indices=tuple([block.indices[row.position] for row in rows]),
            attempts=tuple([block.attempts[row.position] for row in rows]),
            token=block.token,
            frames=(Frame(_frame(stored)),),
            facts=tuple(facts),
        )


@lru_cache(maxsize=4096)
def _frame(lengths: tuple[int, ...]) -> bytes:
    """Rows of zeros."""
    return pack(
        [
            {
                "tokens": np.zeros(length, np.int32),
                "loss_mask": np.ones(length, np.uint8),
                "rollout_logprobs": np.zeros(length, np.float32),
                "spans": np.zeros((1, 4), np.int64),
                "response_text": np.zeros(0, np.uint8),
                "replica": np.zeros(0, np.uint8),
            }
            for length in lengths
        ]
    )


@dataclass(slots=True)
class _Mark:
    """The sums at one moment."""

    at: float
    rows: int
    waited_s: float
    publish_s: float
    tokens: float
    busy_s: float


@dataclass(slots=True)
class _Sums:
    """The trainer's counts."""

    rows: int = 0
    waited_s: float = 0.0
    publish_s: float = 0.0
    ages: Counter[int] = field(default_factory=Counter)


class _SimulatedMesh:
    """The parts of one run."""

    def __init__(self, setting: Setting, loop: asyncio.AbstractEventLoop) -> None:
        self.setting = setting
        self.loop = loop
        self.committed = self.published = Version(1, 0)
        self.processor = Processor(setting, loop)
        self.queue: TransferQueue
        self._workers: list[_Worker] = []
        self._sums = _Sums()
        self._failed: asyncio.Future[None] = loop.create_future()
        self._beside: set[asyncio.Task[None]] = set()

    def beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run until the mesh ends; errors end the mesh."""
        task = self.loop.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._beside.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def run(self) -> Outlook:
        """Until the trainer has made its steps."""
        setting = self.setting
        self.queue = await TransferQueue.open(MemoryStore())
        resident = min(setting.resident_groups, 1 << 30)
        stored = setting.group * SHORT_TOKENS
        await self.queue.open_run(
            RunSpec(
                run=RUN,
                group_size=setting.group,
                batch_groups=setting.batch_groups,
                max_staleness=setting.max_staleness,
                stages=(ROLLOUT_STAGE,),
                resident_batches=setting.resident_batches,
                resident_bytes=1 << 40,
                resident_tokens=0 if resident == 1 << 30 else math.ceil(resident * stored),
                lease_ttl_s=1e6,  # heartbeats end leases; `renew` counts what renewals cost
                max_attempts=1 << 20,
            )
        )
        await self.queue.acquire(RUN, "trainer")
        await self.queue.publish(RUN, self.committed)
        self._workers = [_Worker(number, self) for number in range(setting.workers)]
        self.beside(self._feed())
        for worker in self._workers:
            self.beside(worker.live())
        training = self.loop.create_task(self._train())
        either: set[asyncio.Future[Any]] = {training, self._failed}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            self._failed.result()
        return training.result()

    async def _feed(self) -> None:
        setting = self.setting
        some = max(1, min(64, setting.batch_groups))
        prompt = np.zeros(1, np.int32)
        sampling = SamplingParams(max_tokens=setting.lengths.most)
        for start in itertools.count(0, some):
            tasks = [
                Task(
                    run=RUN,
                    task_id=str(number),
                    prompt_ids=prompt,
                    group_size=setting.group,
                    sampling=sampling,
                )
                for number in range(start, start + some)
            ]
            while tasks:
                with suppress(WaitTimeoutError):
                    done = await self.queue.admit(RUN, tasks, cursor=str(start), wait_s=WAIT_S)
                    await self.processor.spend(rows=done)
                    tasks = tasks[done:]

    async def _train(self) -> Outlook:
        """Take, step, settle; a version travels beside the next step, one at a time."""
        setting, sums, queue = self.setting, self._sums, self.queue
        warm_up = min(setting.steps // 2, max(3, setting.steps // 3))
        mark = self._mark()
        publishing: asyncio.Task[None] | None = None
        for step in range(setting.steps):
            if step == warm_up:
                mark = self._mark()
                sums.ages.clear()
            began = self.loop.time()
            batch = await self._take(step)
            rows = len(batch.rows)
            await self.processor.spend(calls=1 + setting.ranks, rows=2 * rows)
            sums.waited_s += self.loop.time() - began
            await asyncio.sleep(setting.step_s)
            await self.processor.spend(calls=2)
            await queue.settle(RUN, epoch=1, step=step, batch_id=batch.batch_id)
            sums.rows += rows
            sums.ages.update(step - row.oldest.step for row in batch.rows)
            if publishing is not None:
                began = self.loop.time()
                await publishing
                sums.publish_s += self.loop.time() - began
            publishing = self.beside(self._publish(Version(1, step + 1)))
        return self._outlook(mark, setting.steps - warm_up)

    async def _take(self, step: int) -> Any:
        while True:
            with suppress(WaitTimeoutError):
                return await self.queue.take(
                    RUN,
                    epoch=1,
                    step=step,
                    groups=self.setting.batch_groups,
                    batch_id=f"b{step}",
                    wait_s=3600,
                )

    async def _publish(self, version: Version) -> None:
        await asyncio.sleep(self.setting.transfer_s)
        self.committed = version
        await asyncio.gather(*(worker.update(version) for worker in self._workers))
        self.published = version
        await self.processor.spend()
        await self.queue.publish(RUN, version)
        await self.queue.commit(RUN, epoch=1, step=version.step)

    def _mark(self) -> _Mark:
        for worker in self._workers:
            worker.gpu.advance()
            worker.renew()
        return _Mark(
            self.loop.time(),
            self._sums.rows,
            self._sums.waited_s,
            self._sums.publish_s,
            sum(worker.gpu.tokens for worker in self._workers),
            self.processor.busy_s,
        )

    def _outlook(self, since: _Mark, steps: int) -> Outlook:
        now, setting = self._mark(), self.setting
        lasted = now.at - since.at
        tokens = now.tokens - since.tokens
        ages = self._sums.ages
        rows = ages.total()
        return Outlook(
            samples_per_h=3600 * (now.rows - since.rows) / lasted,
            tokens_per_s=tokens / lasted,
            staleness_mean=sum(age * count for age, count in ages.items()) / rows,
            staleness_p99=percentile(ages, 0.99),
            staleness={age: ages[age] / rows for age in sorted(ages)},
            trainer_idle=(now.waited_s - since.waited_s + now.publish_s - since.publish_s) / lasted,
            publish_wait=(now.publish_s - since.publish_s) / lasted,
            rollout_idle=max(0.0, 1 - tokens / (lasted * setting.workers * setting.tokens_per_s)),
            queue_load=(now.busy_s - since.busy_s) / lasted,
            steps=steps,
            with_warm_up_s=now.at - START_S,
        )


def percentile(counts: Counter[int], share: float) -> int:
    """The smallest value that `share` of what was counted does not exceed."""
    left = share * counts.total()
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    return max(counts, default=0)


def run_setting(setting: Setting) -> Outlook:
    """Train `setting.steps` steps in virtual time. Equal settings have equal outlooks."""
    loop = VirtualLoop(setting.seed)
    with quiet():
        try:
            return loop.run_until_complete(_SimulatedMesh(setting, loop).run())
        finally:
            loop.close()
