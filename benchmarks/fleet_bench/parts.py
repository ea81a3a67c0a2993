"""The parts of a small mesh in one process: real queue, real workers, engines that keep a given pace, a feeder."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.contract.errors import ConflictError, WaitTimeoutError
from meshrl.contract.types import (
    ROLLOUT_STAGE,
    OnUpdate,
    RunSpec,
    SamplingParams,
    Task,
    Version,
    WeightManifest,
)
from meshrl.rollout.config import CheckpointIntervals, RowSchedule
from meshrl.rollout.programs import ProgramCache
from meshrl.rollout.worker import RolloutWorker
from meshrl.testing.engines.echo import EchoEngine, build
from meshrl.testing.queue import memory_queue
from meshrl.transferqueue.queue import TransferQueue

RUN = "bench"
GROUP = 8
FIRST = Version(1, 0)
NO_MODEL = Path("no-model")
JOURNAL = CheckpointIntervals(tokens=0, ms=1000)


class Numbers:
    """A tokenizer without words."""

    def decode(self, ids: Any) -> str:
        """Nothing that costs."""
        return ""


@asynccontextmanager
async def open_queue(*, batch_groups: int, max_staleness: float) -> AsyncIterator[TransferQueue]:
    """A queue in memory with one open run, its trainer's epoch 1 and first version."""
    spec = RunSpec(
        run=RUN,
        group_size=GROUP,
        batch_groups=batch_groups,
        max_staleness=max_staleness,
        stages=(ROLLOUT_STAGE,),
        resident_batches=8,
        lease_ttl_s=10.0,
    )
    async with memory_queue([spec]) as queue:
        await queue.acquire(RUN, "trainer")
        await queue.publish(RUN, FIRST)
        yield queue


@asynccontextmanager
async def feeding(queue: TransferQueue, task_of: Callable[[int], Task]) -> AsyncIterator[None]:
    """Admit tasks for as long as the body runs."""

    async def feed() -> None:
        for start in itertools.count(0, 16):
            tasks = [task_of(number) for number in range(start, start + 16)]
            while tasks:
                with contextlib.suppress(WaitTimeoutError):
                    done = await queue.admit(RUN, tasks, cursor=str(start), wait_s=5)
                    tasks = tasks[done:]

    feeder = asyncio.create_task(feed())
    try:
        yield
    finally:
        feeder.cancel()
        await asyncio.gather(feeder, return_exceptions=True)


def task(number: int, *, max_tokens: int, program: str = "single_turn") -> Task:
    """A task of GROUP rows with up to `max_tokens` tokens each."""
    return Task(
        run=RUN,
        task_id=f"t{number:07}",
        prompt_ids=np.arange(8, dtype=np.int32),
        group_size=GROUP,
        sampling=SamplingParams(max_tokens=max_tokens),
        program=program,
    )


def engine(*, slots: int, tokens_per_s: float, tokens_per_delta: int = 20) -> EchoEngine:
    """An engine whose requests run at `tokens_per_s` each, `slots` at once; as long as `max_tokens` says."""
    config = {
        "tokens_per_s": tokens_per_s,
        "tokens_per_delta": tokens_per_delta,
        "response_tokens": 1 << 20,
    }
    return build(config, model=NO_MODEL, slots=slots)


async def serve_version(
    target: EchoEngine, version: Version, on_update: OnUpdate = OnUpdate.IN_FLIGHT
) -> None:
    """Stage and commit."""
    manifest = WeightManifest(
        run=RUN, version=version, tensors=(), bucket_bytes=(), bucket_hashes=()
    )
    await target.stage_weights(manifest, [])
    await target.commit_weights(version, on_update)


class Replica:
    """A worker and its engine, started at `version` and drained at the end."""

    def __init__(self, queue: TransferQueue, name: str, made: EchoEngine, slots: int) -> None:
        self.engine = made
        self.worker = RolloutWorker(
            queue,
            made,
            Numbers(),
            runs=[RUN],
            worker=name,
            schedule=RowSchedule(slots=slots, checkpoint=JOURNAL),
            programs=ProgramCache("fleet_bench.agent"),
        )
        self._work: asyncio.Task[None] | None = None

    async def start(self, version: Version) -> None:
        """Serve."""
        await self.engine.start()
        await serve_version(self.engine, version)
        self._work = asyncio.create_task(self.worker.run(grace_s=5))

    async def leave(self) -> None:
        """Drain: what runs is handed over."""
        assert self._work is not None
        self.worker.drain()
        with contextlib.suppress(ConflictError):
            await self._work
        await self.engine.close()
