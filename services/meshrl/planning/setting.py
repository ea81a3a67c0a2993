"""A simulated fleet: its size and policy, the lengths of responses, how long everything takes, what is busy."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from meshrl.contract.stage_worker import Intake
from meshrl.contract.types import OnUpdate
from meshrl.rewardd.reward_stage import INTAKE

CALL_S: Final = 1000e-6
"""Processor time of one call in a queue process with gRPC (benchmarks/scale.py --handlers, benchmarks/RESULTS.md)."""
ROW_S: Final = 20e-6
"""Processor time of one more row in a call, from the same measurement."""
P99: Final = NormalDist().inv_cdf(0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Response lengths: log-normal with this mean and 99th percentile, cut at `most` tokens."""

    mean: float
    p99: float
    most: int
    alike: float = 0.0
    """The share of the (logarithmic) variance that belongs to the prompt: with 1 a group's rows are equally long."""

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm. `p99 <= mean`: all responses have the mean."""
        ratio = math.log(self.p99 / self.mean)
        return 0.0 if ratio <= 0 else P99 - math.sqrt(max(0.0, P99**2 - 2 * ratio))

    def draw(self, seed: int, task: int, index: int, attempt: int = 0) -> int:
        """Tokens of row `index` of a task: the same wherever it is sampled, and others when it is issued again.

        Without that, a prompt whose long response was too old to be trained would be sampled as long again for ever.
        """
        sigma = self.sigma
        prompt = random.Random(seed << 40 | task << 1).gauss(0, 1)
        own = (seed << 40 | task << 1 | 1) * 65537 + index
        row = random.Random(attempt << 128 | own).gauss(0, 1)
        z = math.sqrt(self.alike) * prompt + math.sqrt(1 - self.alike) * row
        tokens = math.exp(math.log(self.mean) - sigma**2 / 2 + sigma * z)
        return max(1, min(self.most, round(tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """The places in which one part of the reward scores samples."""

    count: int
    """Samples that it scores at once."""
    seconds: float
    """The time of one sample."""
    every_s: float
    """A place takes the next sample so long after the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A fleet, its policy and how long everything takes."""

    workers: int
    slots: int
    tokens_per_s: float
    """Tokens a second of one worker whose slots are all busy."""
    lengths: Lengths
    group: int
    batch_groups: int
    step_s: float
    alone_speedup: float = 1.0
    """Speed of a request that runs alone, over that of one among `slots`."""
    max_staleness: float = 1
    resident_batches: int = 4
    resident_groups: float = math.inf
    """Groups whose payload `queue.resident_bytes` and `resident_tokens` hold."""
    on_update: OnUpdate = OnUpdate.IN_FLIGHT
    transfer_s: float = 0.0
    """Seconds from the end of a step until every worker has staged its version."""
    commit_s: float = 0.0
    """How long an engine pauses to load what it has staged."""
    sync_batches: bool = False
    """A worker leases `slots` rows at once, when it holds none; they begin each turn together, and are written
    together (`rollout.deterministic`)."""
    reward: tuple[Seats, ...] = ()
    """Parts of the reward that take time: a sample has its score once all of them have scored it."""
    reward_intake: Intake = INTAKE
    """Rows that the reward service holds, and in each call of its judge."""
    tool_calls: int = 0
    """Calls of tools in one response, one after the other; its slot stays taken meanwhile."""
    tool_s: float = 0.0
    """Seconds of each call."""
    ranks: int = 1
    """Trainer processes: each fetches its own rows."""
    stages: int = 1
    """Further stages, each of which leases and writes every row, in no time."""
    renewals_per_s: float = 0.6
    """Calls of a worker that holds rows, to keep its leases: three in `queue.lease_ttl_s`."""
    call_s: float = CALL_S
    row_s: float = ROW_S
    most_rows: int = 2500
    """The most rows; training ends earlier once its rate is steady."""
    seed: int = 0


class Processor:
    """The queue's processor: calls take their time one after the other."""

    def __init__(self, setting: Setting, clock: Callable[[], float]) -> None:
        self.busy_s = 0.0
        self._setting = setting
        self._free_at = 0.0
        self._clock = clock

    def charge(self, *, calls: float = 1, rows: int = 0) -> float:
        """Busy for these calls after what it has to do; returns how long from now until they are done."""
        cost = calls * self._setting.call_s + rows * self._setting.row_s
        now = self._clock()
        self._free_at = max(now, self._free_at) + cost
        self.busy_s += cost
        return self._free_at - now

    def charge_spread(self, calls: float) -> None:
        """Count calls that came one by one over a long time, without waits."""
        self.busy_s += calls * self._setting.call_s

    async def spend(self, *, calls: int = 1, rows: int = 0) -> None:
        """Wait until the calls have had their turn."""
        await asyncio.sleep(self.charge(calls=calls, rows=rows))


class PacedGpu:
    """An engine's speed, shared evenly by its running requests: a decode step takes the longer the more there are."""

    def __init__(self, *, slots: int, tokens_per_s: float, alone_speedup: float) -> None:
        self.running = 0
        self.tokens = 0.0
        self._slots = slots
        self._together = slots / tokens_per_s
        """Seconds for a token of each request while all slots are busy."""
        self._alone = self._together / alone_speedup
        self._loop = asyncio.get_running_loop()
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._served = 0.0
        """Tokens that a request would have which has run from the start on."""
        self._at = self._loop.time()
        self._paused = False
        self._timer: asyncio.Handle | None = None
        self._due = 0.0
        """When the timer looks. uvloop's handle of a timer that is due at once cannot say."""

    def sample(self, tokens: float, done: Callable[[], None]) -> None:
        """Sample the tokens, then call `done`."""
        self.advance()
        self.running += 1
        heapq.heappush(self._ends, (self._served + tokens, next(self._number), done))
        self._arm()

    def pause(self, paused: bool) -> None:
        """Stand still, or continue."""
        self.advance()
        self._paused = paused
        self._arm()

    def _speed(self) -> float:
        """Tokens per second of each running request."""
        if self._paused or not self.running:
            return 0.0
        more = (self.running - 1) / (self._slots - 1) if self._slots > 1 else 1.0
        return 1 / (self._alone + (self._together - self._alone) * more)

    def advance(self) -> None:
        """Count what was sampled until now."""
        now = self._loop.time()
        gained = (now - self._at) * self._speed()
        self._served += gained
        self.tokens += gained * self.running
        self._at = now

    def _arm(self) -> None:
        """Set the timer to the next end; a timer that is too early stays."""
        speed = self._speed()
        if not speed:
            if self._timer:
                self._timer.cancel()
                self._timer = None
            return
        due = self._at + max(0.0, self._ends[0][0] - self._served) / speed
        if self._timer is not None:
            if self._due <= due:
                return
            self._timer.cancel()
        self._due = due
        self._timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        self.advance()
        # The clock may not be fine enough for the next end: what is that near is now.
        served = self._served + max(1e-6, 4 * math.ulp(self._at) * self._speed())
        while self._ends and self._ends[0][0] <= served:
            _, _, done = heapq.heappop(self._ends)
            self.running -= 1
            done()
        self._arm()
