"""Workers tell the trainer why a fleet does not sample: a failing engine, an engine without weights, no report."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from meshrl.config.weights import WeightsConfig
from meshrl.contract.types import ROLLOUT_STAGE, RunSpec, Version
from meshrl.launcher.observer import fleet_waits
from meshrl.rollout.config import CircuitBreakerConfig, RowSchedule
from meshrl.rollout.worker import RolloutWorker
from meshrl.testing.engines import echo
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore
from meshrl.weights.fleet import ReplicaReport

from .test_rollout_worker import RUN, Words, commit, tasks
from .weights_fleet import opened


async def test_each_worker_that_cannot_sample_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await TransferQueue.open(MemoryStore())
    engine = echo.build({}, model=tmp_path, slots=8)
    await engine.start()
    engine.behave(echo.Behaviour.FAIL)
    schedule = RowSchedule(slots=8, breaker=CircuitBreakerConfig(pause_s=1000))
    worker = RolloutWorker(queue, engine, Words(), runs=[RUN], worker="w", schedule=schedule)

    def report() -> ReplicaReport:
        return ReplicaReport(engine=engine.stats(), worker=worker.report())

    monkeypatch.setattr(WeightsConfig, "beat_s", 0.05)
    async with opened("shm", tmp_path) as fleet:
        trainer = fleet.server.address
        fleet.join("rollout-0", report=report)

        async def waits() -> list[tuple[str, str]]:
            await asyncio.sleep(0.1)  # for the next report
            return [(wait.who, wait.what) for wait in await fleet_waits(trainer, ["rollout-0"])]

        async with asyncio.timeout(30):
            while await waits() != [("rollout-0", "its engine, which serves no version yet")]:
                pass
        _, silent = await fleet_waits(trainer, ["rollout-0", "rollout-1"])
        assert silent.who == "rollout-1" and "has never heard of it" in silent.what

        await commit(engine)
        async with asyncio.timeout(30):
            while await waits():
                pass

        stages = (ROLLOUT_STAGE,)
        await queue.open_run(
            RunSpec(run=RUN, group_size=4, batch_groups=8, max_staleness=0.0, stages=stages)
        )
        await queue.acquire(RUN, "trainer")
        await queue.publish(RUN, Version(1, 0))
        await queue.admit(RUN, tasks(8), cursor="", wait_s=5)
        working = asyncio.ensure_future(worker.run())
        async with asyncio.timeout(30):
            while not await waits():
                pass
        (failing,) = await fleet_waits(trainer, ["rollout-0"])
        assert failing.what.startswith(
            "its engine, which fails: InfraError: the engine was told to fail"
        )
        assert failing.owners == ("rollout-0",)
        worker.drain()
        await working
    (away,) = await fleet_waits(trainer, ["rollout-0"])
    assert away.what.startswith("the trainer, to which they report: ")
    await engine.close()
    await queue.close()
