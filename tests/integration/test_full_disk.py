"""The queue's disk is full for a while: services wait, say so, keep their leases, and continue by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from meshrl.contract.errors import CapacityError, WaitTimeoutError
from meshrl.contract.stage_worker import Intake, StageWorker
from meshrl.contract.types import REWARD_STAGE, ROLLOUT_STAGE, LeasedRow, RowWrite, Version
from meshrl.rpc.clients.base import Patience
from meshrl.rpc.clients.queue import QueueClient
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.testing.contract.queue_actors import Actors, rollout_of, spec, tasks, waiting_entries
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import Operation
from meshrl.transferqueue.stores.disk import DiskStore

from ..waiting import until

ROWS = 12
NOW = Version(1, 0)
PLENTY_S = 60


class SmallStore(DiskStore):
    """On a disk that is full now and then: `rows` may not come in, or `nothing` can be stored at all."""

    full = ""

    def check_room(self, nbytes: int) -> None:
        if self.full:
            raise CapacityError(f"no space for {nbytes} bytes", free=0, wanted=nbytes)

    async def apply(self, operations: Sequence[Operation]) -> None:
        if self.full == "nothing":
            raise CapacityError("the disk took no more", free=0)
        await super().apply(operations)


@asynccontextmanager
async def meshed(
    path: Path, patience: Patience | None
) -> AsyncIterator[tuple[SmallStore, Actors, QueueClient]]:
    """The store of a queue, actors beside it, and a service's way to it."""
    store = SmallStore(path)
    queue = await TransferQueue.open(store)
    settings = ServerSettings(metrics_port=None, drain_grace_s=1)
    try:
        async with (
            GrpcServer(settings, [QueueServicer(queue)]) as server,
            QueueClient(server.address, retry_s=1, patience=patience) as client,
        ):
            actors = Actors(queue)
            stages = (ROLLOUT_STAGE, REWARD_STAGE)
            await actors.start(
                spec(group_size=1, batch_groups=ROWS, lease_ttl_s=1.0, stages=stages)
            )
            yield store, actors, client
    finally:
        store.full = ""
        await queue.close()


def rolling(queue: QueueClient, go: asyncio.Event) -> StageWorker:
    """Rows are answered once `go` is set."""

    async def handle(rows: Sequence[LeasedRow]) -> list[RowWrite]:
        await go.wait()
        return [rollout_of(row, NOW) for row in rows]

    return StageWorker(
        queue,
        ["run"],
        ROLLOUT_STAGE,
        handle,
        worker="w",
        intake=Intake(limit=ROWS, version=lambda: NOW),
    )


async def until_waits_for(actors: Actors, what: str) -> None:
    """Wait until `why_waiting` says so."""
    await waiting_entries(actors.queue, lambda wait: what in f"{wait.who}: {wait.what}")


@pytest.mark.parametrize("full", ["rows", "nothing"])
async def test_a_stage_waits_for_space_and_writes_each_row_once(
    tmp_path: Path, full: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with meshed(tmp_path, Patience()) as (store, actors, client):
        await actors.feed(tasks(ROWS, group_size=1))
        go = asyncio.Event()
        loop = rolling(client, go)
        working = asyncio.create_task(loop.run())
        await until(lambda: loop.held == ROWS)
        store.full = full
        go.set()
        who = "stage rollout" if full == "rows" else "everybody"
        await until_waits_for(actors, f"{who}: space in the store: no space for")
        await asyncio.sleep(2.5)  # longer than a lease: renewals continue
        assert not working.done() and loop.stats.lost == 0
        store.full = ""
        await until(lambda: loop.stats.written == ROWS)
        loop.drain()
        await working
        assert loop.stats.written == ROWS and loop.stats.failed == 0
        assert await actors.resident() == {"pending": ROWS}
        lines = [
            f"{waiting.who}: {waiting.what}" for waiting in await actors.queue.why_waiting("run")
        ]
        assert not any("space" in line for line in lines), lines
    assert caplog.text.count("waiting for space, for 0 s now") >= 1
    assert "there is space again" in caplog.text


async def test_a_feeder_waits_for_space_no_longer_than_it_asked_to(tmp_path: Path) -> None:
    async with meshed(tmp_path, Patience()) as (store, actors, client):
        store.full = "rows"
        given = tasks(ROWS, group_size=1)
        with pytest.raises(WaitTimeoutError, match="waiting for space"):
            await client.admit("run", given, cursor="", wait_s=0.2)
        feeding = asyncio.create_task(client.admit("run", given, cursor="", wait_s=PLENTY_S))
        await until_waits_for(actors, "feeder: space in the store")
        store.full = ""
        assert await feeding == ROWS
        assert await actors.resident() == {"queued": ROWS}


async def test_a_stage_ends_when_it_is_drained_while_the_disk_is_full(tmp_path: Path) -> None:
    async with meshed(tmp_path, Patience()) as (store, actors, client):
        await actors.feed(tasks(ROWS, group_size=1))
        go = asyncio.Event()
        go.set()
        loop = rolling(client, go)
        loop.release_s = 0.2
        store.full = "rows"
        working = asyncio.create_task(loop.run(grace_s=0.2))
        await until_waits_for(actors, "stage rollout")
        store.full = "nothing"
        loop.drain()
        async with asyncio.timeout(PLENTY_S):
            await working
        store.full = ""
        assert loop.stats.written == 0
        assert sum((await actors.resident()).values()) == ROWS


async def test_a_caller_that_is_to_end_waits_for_space_a_little_longer_and_gets_the_error(
    tmp_path: Path,
) -> None:
    patience = Patience(last_wait_s=0.2)
    async with meshed(tmp_path, patience) as (store, actors, client):
        await actors.feed(tasks(1, group_size=1))
        store.full = "nothing"
        publishing = asyncio.create_task(client.publish("run", Version(1, 1)))
        done, _ = await asyncio.wait({publishing}, timeout=0.5)
        assert not done
        patience.stop_waiting()
        async with asyncio.timeout(PLENTY_S):
            with pytest.raises(CapacityError, match="the disk took no more"):
                await publishing
        store.full = ""
        assert (await client.run_state("run")).published == NOW


async def test_a_client_that_does_not_wait_gets_a_clear_error(tmp_path: Path) -> None:
    async with meshed(tmp_path, None) as (store, _, client):
        store.full = "rows"
        with pytest.raises(CapacityError, match="no space for"):
            await client.admit("run", tasks(1, group_size=1), cursor="", wait_s=PLENTY_S)
