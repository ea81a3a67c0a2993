"""Configuration of the transfer queue: the recipe's `queue:` section."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, NonNegativeInt, PositiveFloat, PositiveInt

from meshrl.common.checks import Problem, check_required
from meshrl.common.config import Config, Machine
from meshrl.contract.types import (
    REWARD_STAGE,
    ROLLOUT_STAGE,
    GroupPolicy,
    RunSpec,
    StageSpec,
    StalePolicy,
)

STORES = "meshrl.transferqueue.stores"


def _spell_infinity(value: object) -> object:
    """Spell YAML's float `.inf` as the recipe's word "inf"."""
    return "inf" if isinstance(value, float) and math.isinf(value) and value > 0 else value


def _know_old_names(value: object) -> object:
    if value == "process":
        raise ValueError('"process" is spelled "none" (want always or none)')
    return value


Durability = Annotated[Literal["always", "none"], BeforeValidator(_know_old_names)]
Staleness = Annotated[NonNegativeInt | Literal["inf"], BeforeValidator(_spell_infinity)]


class QueueConfig(Config):
    """The store of rows, and its bounds."""

    store: str = "disk"
    """A module of `meshrl.transferqueue.stores` (disk, memory, redis), or a dotted path."""
    path: Path | None = None
    """Folder of the disk store; none means `<run.dir>/queue`."""
    durability: Durability = "always"
    """Loss in a power cut: `always` (fsync) loses no acknowledged data, `none` may lose everything. kill -9 of the
    queue loses nothing with either one (except in the memory store)."""
    reserve_bytes: NonNegativeInt = 64 << 20
    """Free disk space (redis: part of maxmemory) that new rows may not use, so that rows can still leave."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    """redis://, rediss:// (TLS) or unix://. Of several, separated by commas, the master's is used."""
    redis_prefix: str = ""
    """Prefix of the queue's keys, unique in the Redis; none means the path of `<run.dir>/queue`."""
    redis_password_file: Path | None = None
    """A file with the password, which then is not needed in the URL."""
    redis_wait_s: PositiveFloat = 30.0
    """Seconds that a commit waits for a Redis that restarts, fails over or hangs. Then calls are refused as by a
    queue that is away: services repeat them for 120 s, and a trainer that got none through saves and ends."""
    compression: Literal["auto", "off", "zstd"] = "auto"
    """Compression of payload over gRPC: `auto` compresses between hosts, not on loopback. Lossless, about 2.5 times
    fewer bytes."""
    max_staleness: Staleness = 1
    """Optimizer steps between sampling and training: 0 is on-policy, "inf" fully asynchronous."""
    lease_ttl_s: PositiveFloat = 5.0
    """Seconds without a renewal after which a worker loses its rows; one that dies loses them at once. Time in which
    the queue itself could not receive renewals does not count."""
    max_attempts: PositiveInt = 3
    """Deliveries of a row to a stage before it is dead-lettered; and how often a group that grew too old is issued
    again before it leaves as stale."""
    group_policy: GroupPolicy = GroupPolicy.ALL
    """When a group is complete: all | k_of_n | replace_sibling."""
    group_k: NonNegativeInt = 0
    """For k_of_n: how many finished rows make a group complete."""
    stale_policy: StalePolicy = StalePolicy.REISSUE
    """Treatment of a prompt whose rows grew too old: reissue | drop. `drop` also lets no batch wait for slow rows."""
    resident_batches: PositiveInt = 4
    """Admission bound in batches if `max_staleness` is inf."""
    resident_bytes: PositiveInt = 4 << 30
    """Payload of groups that wait to be trained; beyond it new groups wait (one batch is always admitted)."""
    sampler: str = "fifo"
    """The order in which complete groups are taken: a module of `meshrl.transferqueue.samplers`, or a dotted path."""

    def run_spec(
        self,
        run: str,
        *,
        group_size: int,
        batch_groups: int,
        stages: tuple[StageSpec, ...] = (ROLLOUT_STAGE, REWARD_STAGE),
        vocabulary: int = 0,
    ) -> RunSpec:
        """The spec of the training run of this configuration."""
        return RunSpec(
            run=run,
            group_size=group_size,
            batch_groups=batch_groups,
            max_staleness=math.inf if self.max_staleness == "inf" else float(self.max_staleness),
            stages=stages,
            group_policy=self.group_policy,
            group_k=self.group_k,
            stale_policy=self.stale_policy,
            max_attempts=self.max_attempts,
            lease_ttl_s=self.lease_ttl_s,
            resident_batches=self.resident_batches,
            resident_bytes=self.resident_bytes,
            sampler=self.sampler,
            vocabulary=vocabulary,
        )

    def check(self, machine: Machine, *, samples: int) -> Iterator[Problem]:
        """Problems: missing packages of the store, and groups of `samples` rows that can never be complete."""
        yield from check_required(("queue", "store"), STORES, self.store, machine)
        if self.group_policy == "k_of_n" and not 0 < self.group_k <= samples:
            yield (
                ("queue", "group_k"),
                f"queue.group_k: got {self.group_k}, want 1 to rollout.n = {samples} for k_of_n",
            )
