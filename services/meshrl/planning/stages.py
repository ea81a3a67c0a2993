"""The real queue at the price of its processor, and what leases from it: rollout workers and the reward service."""

from __future__ import annotations

import asyncio
import functools
import heapq
import random
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np

from meshrl.contract.errors import WaitTimeoutError
from meshrl.contract.frames import Frame, pack
from meshrl.contract.held_rows import GATHER_S
from meshrl.contract.stage_worker import LEASE_WAIT_S
from meshrl.contract.types import (
    REWARD_STAGE,
    ROLLOUT_STAGE,
    LeasedBlock,
    OnUpdate,
    Outcome,
    RowBlock,
    RowFacts,
    StageSpec,
    Version,
)
from meshrl.planning.setting import PacedGpu, Processor, Seats, Setting
from meshrl.transferqueue.queue import TransferQueue

RUN: Final = "plan"
FIRST: Final = Version(1, 0)
NEVER_S: Final = 1e11
"""Waits have no end here: calls of idle workers, one every LEASE_WAIT_S, are charged, not simulated."""
MOST_TURNS: Final = 8
"""Turns of a response that are simulated: more calls of tools are put together."""
STAGES: Final = (
    StageSpec(name=ROLLOUT_STAGE.name, reads=ROLLOUT_STAGE.reads, writes=("response_text",)),
    StageSpec(name=REWARD_STAGE.name, reads=("response_text",), writes=("reward_hash",)),
)
"""Stages with one column each, because the queue examines every column that is written."""


@dataclass(slots=True, eq=False)
class Row:
    """One leased row."""

    block: LeasedBlock
    position: int
    tokens: int = 0
    tokens_left: float = 0.0
    turns_left: int = 0
    """After the turn that is sampled or waits."""
    oldest: Version | None = None
    """The version that began it; None before."""


class PricedQueue:
    """The queue, whose calls wait for their turn at its processor."""

    def __init__(self, setting: Setting, queue: TransferQueue) -> None:
        self.setting = setting
        self.queue = queue
        self.clock = asyncio.get_running_loop().time
        self.processor = Processor(setting, self.clock)
        self.published = FIRST
        """The fleet's version, as the queue knows it."""

    async def lease(
        self,
        stage: str,
        worker: str,
        *,
        limit: int,
        at_least: int = 1,
        version: Version | None = None,
    ) -> list[Row]:
        """Rows of a stage; none where `version` has become too old."""
        await self.processor.spend()
        asked, rows = self.clock(), list[Row]()
        with suppress(WaitTimeoutError):
            lease = await self.queue.lease(
                [RUN],
                stage,
                worker=worker,
                limit=limit,
                at_least=at_least,
                version=version,
                wait_s=NEVER_S,
            )
            rows = [Row(block, at) for block in lease.blocks for at in range(len(block))]
        self.processor.charge_spread((self.clock() - asked) // LEASE_WAIT_S)
        self.processor.charge(calls=0, rows=len(rows))
        return rows

    async def write(self, stage: StageSpec, rows: Sequence[Row], newest: Version) -> None:
        """Write the columns of leased rows; the latest tokens of sampled ones are of `newest`."""
        await self.processor.spend(rows=len(rows))
        by_block: dict[int, list[Row]] = {}
        for row in rows:
            by_block.setdefault(id(row.block), []).append(row)
        blocks: list[RowBlock] = []
        for held in by_block.values():
            block, at = held[0].block, [row.position for row in held]
            facts = [
                RowFacts(Outcome.OK, row.tokens, row.oldest, max(row.oldest, newest))
                for row in held
                if row.oldest is not None
            ]
            blocks.append(
                RowBlock(
                    task=block.task,
                    indices=tuple([block.indices[position] for position in at]),
                    attempts=tuple([block.attempts[position] for position in at]),
                    token=block.token,
                    frames=(Frame(_empty(stage.writes[0], len(held))),),
                    facts=tuple(facts),
                )
            )
        await self.queue.write(RUN, stage.name, blocks)


class PacedWorker:
    """Leases for its free slots, samples, and writes what is finished together."""

    def __init__(self, number: int, queue: PricedQueue) -> None:
        self.name = f"rollout-{number}"
        self.version = FIRST
        self.held_s = 0.0
        """Sum of the seconds in which slots held a row."""
        self._queue, self._setting = queue, queue.setting
        setting = queue.setting
        self.gpu = PacedGpu(
            slots=setting.slots,
            tokens_per_s=setting.tokens_per_s,
            alone_speedup=setting.alone_speedup,
        )
        self._turns = min(setting.tool_calls, MOST_TURNS - 1) + 1
        self._held = 0
        self._counted_at = 0.0
        """Held slots and renewals are counted up to then."""
        self._waiting: deque[Row] = deque()
        """Rows whose turn has come: while an update drains the engine, and in a sync batch until all are there."""
        self._updating = False
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._finished: list[Row] = []
        self._written = asyncio.Event()
        self._cuts = random.Random(f"{setting.seed} turns {number}")

    async def update(self, version: Version) -> None:
        """Serve `version`, in the way that the recipe says."""
        setting = self._setting
        if setting.on_update is OnUpdate.DRAIN and self.gpu.running:
            self._updating = True
            self._idle.clear()
            await self._idle.wait()
        if setting.commit_s:
            self.gpu.pause(True)
            await asyncio.sleep(setting.commit_s)
            self.gpu.pause(False)
        self.version = version
        self._updating = False
        self._begin_turns()
        self._changed.set()

    def count(self) -> None:
        """Count the held slots until now, and charge the queue for the renewals of what they hold."""
        now = self._queue.clock()
        lasted = now - self._counted_at
        self.held_s += lasted * self._held
        if self._held:
            self._queue.processor.charge(calls=lasted * self._setting.renewals_per_s)
        self._counted_at = now

    async def lease(self) -> None:
        """Fill free slots; a sync batch once nothing is held."""
        setting = self._setting
        while True:
            free = setting.slots - self._held
            if not free or (setting.sync_batches and (self._held or self._finished)):
                await self._until_changed()
                continue
            rows = await self._queue.lease(
                ROLLOUT_STAGE.name,
                self.name,
                limit=free,
                at_least=setting.slots if setting.sync_batches else 1,
                version=self.version,
            )
            behind = self._queue.published.step - self.version.step
            if not rows and behind > setting.max_staleness:
                await self._until_changed()  # only an update helps
                continue
            self.count()
            self._held += len(rows)
            for row in rows:
                block, at = row.block, row.position
                row.tokens = setting.lengths.draw(
                    setting.seed, int(block.task), block.indices[at], block.attempts[at]
                )
                row.tokens_left, row.turns_left = row.tokens, self._turns - 1
            self._waiting.extend(rows)
            self._begin_turns()

    async def _until_changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _begin_turns(self) -> None:
        """Sample what waits, if it may."""
        if self._updating or (self._setting.sync_batches and len(self._waiting) < self._held):
            return
        while self._waiting:
            row = self._waiting.popleft()
            row.oldest = row.oldest or self.version
            turn = row.tokens_left
            if row.turns_left:  # turns are cut at random places
                turn *= 1 - self._cuts.random() ** (1 / row.turns_left)
            row.tokens_left -= turn
            self.gpu.sample(turn, functools.partial(self._turned, row))

    def _turned(self, row: Row) -> None:
        setting = self._setting
        if not self.gpu.running:
            self._idle.set()
        if row.turns_left:
            row.turns_left -= 1
            pause = setting.tool_s * setting.tool_calls / (self._turns - 1)
            asyncio.get_running_loop().call_later(pause, self._observed, row)
            return
        self.count()
        self._held -= 1
        self._finished.append(row)
        self._begin_turns()
        if not (setting.sync_batches and self._held):
            self._written.set()
            self._changed.set()

    def _observed(self, row: Row) -> None:
        """Note that its tools have answered."""
        self._waiting.append(row)
        self._begin_turns()

    async def write(self) -> None:
        """Write what is finished, GATHER_S after the last write while other rows run."""
        while True:
            await self._written.wait()
            self._written.clear()
            rows, self._finished = self._finished, []
            await self._queue.write(STAGES[0], rows, self.version)
            # Further stages: a lease and a write each, whose rows come together as these did.
            calls = 2 * self._setting.stages
            self._queue.processor.charge(calls=calls, rows=calls * len(rows))
            self._changed.set()
            if self._held and not self._setting.sync_batches:
                await asyncio.sleep(GATHER_S)


class RewardService:
    """Leases what has a response, and writes each call of the judge once its last sample has a score."""

    def __init__(self, queue: PricedQueue) -> None:
        self._queue = queue
        self._parts = [_SeatQueue(seats) for seats in queue.setting.reward]
        self._held = 0
        self._changed = asyncio.Event()

    @property
    def busy_s(self) -> float:
        """Seconds in which the busiest part scored as much at once as it can."""
        return max((part.busy_s for part in self._parts), default=0.0)

    async def work(self) -> None:
        """As the stage worker of the reward service does."""
        intake = self._queue.setting.reward_intake
        assert isinstance(intake.per_call, int)
        async with asyncio.TaskGroup() as calls:
            while True:
                while self._held >= intake.limit:
                    self._changed.clear()
                    await self._changed.wait()
                free = intake.limit - self._held
                rows = await self._queue.lease(REWARD_STAGE.name, "reward", limit=free)
                self._held += len(rows)
                for start in range(0, len(rows), intake.per_call):
                    calls.create_task(self._score(rows[start : start + intake.per_call]))

    async def _score(self, rows: Sequence[Row]) -> None:
        now = self._queue.clock()
        await asyncio.sleep(max(part.serve(now, len(rows)) for part in self._parts) - now)
        self._held -= len(rows)
        self._changed.set()
        await self._queue.write(STAGES[1], rows, FIRST)


class _SeatQueue:
    """The places of one part of the reward, in which samples are scored in the order in which they came."""

    def __init__(self, seats: Seats) -> None:
        self.busy_s = 0.0
        self._seats = seats
        self._free_at = [0.0] * seats.count

    def serve(self, now: float, samples: int) -> float:
        """The time at which the last of the samples has its score."""
        seats, end = self._seats, now
        for _ in range(samples):
            begin = max(now, self._free_at[0])
            heapq.heapreplace(self._free_at, begin + seats.every_s)
            self.busy_s += seats.every_s / seats.count
            end = max(end, begin + seats.seconds)
        return end


@functools.lru_cache(maxsize=1024)
def _empty(column: str, rows: int) -> bytes:
    """Rows without content, which the queue does not look into."""
    return pack([{column: np.zeros(0, np.uint8)} for _ in range(rows)])
