"""The members report why a fleet does not sample: a failing engine, an engine without weights, no report."""

from __future__ import annotations

import asyncio
from pathlib import Path

from meshrl.contract.types import ROLLOUT_STAGE, RunSpec, Version
from meshrl.launcher.fleet_waits import fleet_waits
from meshrl.rollout.config import CircuitBreakerConfig
from meshrl.rollout.worker import RolloutWorker
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers.member import MemberServicer
from meshrl.testing.engines import echo
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from .test_rollout_worker import RUN, Words, commit, tasks


async def test_each_worker_that_cannot_sample_says_why(tmp_path: Path) -> None:
    queue = await TransferQueue.open(MemoryStore())
    engine = echo.build({}, model=tmp_path, slots=8)
    await engine.start()
    engine.behave(echo.Behaviour.FAIL)
    breaker = CircuitBreakerConfig(pause_s=1000, longest_pause_s=1000)
    worker = RolloutWorker(queue, engine, Words(), runs=[RUN], worker="w", slots=8, breaker=breaker)
    servicer = MemberServicer(worker, engine, leave=lambda: None)
    async with GrpcServer(ServerSettings(metrics_port=None, drain_grace_s=1), [servicer]) as server:
        fleet = {"rollout-0": server.address, "rollout-1": "127.0.0.1:1"}
        fresh, silent = await fleet_waits(fleet)
        assert (fresh.who, fresh.what) == ("rollout-0", "its engine, which serves no version yet")
        assert silent.who == "rollout-1" and "127.0.0.1:1 cannot be reached" in silent.what

        await commit(engine)
        assert await fleet_waits({"rollout-0": server.address}) == []

        stages = (ROLLOUT_STAGE,)
        await queue.open_run(
            RunSpec(run=RUN, group_size=4, batch_groups=8, max_staleness=0.0, stages=stages)
        )
        await queue.acquire(RUN, "trainer")
        await queue.publish(RUN, Version(1, 0))
        await queue.admit(RUN, tasks(8), cursor="", wait_s=5)
        working = asyncio.ensure_future(worker.run())
        async with asyncio.timeout(30):
            while worker.breaker is None or not worker.breaker.opened:  # noqa: ASYNC110 (no event)
                await asyncio.sleep(0.01)
        (failing,) = await fleet_waits({"rollout-0": server.address})
        assert failing.what.startswith(
            "its engine, which fails: InfraError: the engine was told to fail"
        )
        assert failing.owners == ("rollout-0",)
        worker.drain()
        await working
    await engine.close()
    await queue.close()
