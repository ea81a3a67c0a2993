"""What a simulated fleet is made of: its size, its policy, the lengths of responses and how long everything takes."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from meshrl.contract.types import OnUpdate

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
        """Of the logarithm. `p99 <= mean`: all responses have the mean."""
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
class Setting:
    """A fleet, its policy and how long everything takes."""

    workers: int
    slots: int
    tokens_per_s: float
    """Of one worker whose slots are all busy."""
    lengths: Lengths
    group: int
    batch_groups: int
    step_s: float
    alone_speedup: float = 1.0
    """A request that runs alone is so many times as fast as one among `slots`."""
    max_staleness: float = 1
    resident_batches: int = 4
    resident_groups: float = math.inf
    """Groups whose payload `queue.resident_bytes` and `resident_tokens` hold."""
    on_update: OnUpdate = OnUpdate.IN_FLIGHT
    transfer_s: float = 0.0
    """From the end of a step until every worker has staged its version."""
    commit_s: float = 0.0
    """How long an engine pauses to load what it has staged."""
    reward_s: float = 0.0
    tool_calls: int = 0
    """Calls of tools in one response; its slot stays taken meanwhile."""
    tool_s: float = 0.0
    """Mean of one call of a tool, exponential."""
    failures_per_h: float = 0.0
    """Of one worker; its rows begin again elsewhere."""
    restart_s: float = 60.0
    ranks: int = 1
    """Trainer processes: each fetches its own rows."""
    stages: int = 1
    """Stages beside rollout, each of which leases and writes every row."""
    renewals_per_s: float = 0.6
    """Calls of a worker that holds rows, to keep its leases: three in `queue.lease_ttl_s`."""
    call_s: float = CALL_S
    row_s: float = ROW_S
    steps: int = 12
    seed: int = 0
