"""A queue that is closed or killed, and opened again on the same store, continues where it was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from meshrl.contract.errors import EndOfDataError, UnavailableError, WaitTimeoutError
from meshrl.contract.types import Version
from meshrl.testing.contract.queue_actors import WAIT_S, Actors, batch_uids, spec, task, tasks, uids
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.disk import DiskStore
from meshrl.transferqueue.stores.memory import MemoryStore

Life = tuple[Actors, Callable[[], Awaitable[None]]]


@pytest.fixture(params=["memory", "disk"])
async def life(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Life]:
    """Actors on a new queue, and a function that closes it and opens it again for them."""
    memory = MemoryStore()

    def store() -> MemoryStore | DiskStore:
        return memory if request.param == "memory" else DiskStore(tmp_path / "queue")

    actors = Actors(await TransferQueue.open(store()))

    async def reopen() -> None:
        before = await actors.queue.ledger("run")
        await actors.queue.close()
        actors.queue = await TransferQueue.open(store())
        assert await actors.ledger() == before

    yield actors, reopen
    await actors.queue.close()


async def test_a_vocabulary_that_is_filled_in_survives(life: Life) -> None:
    actors, reopen = life
    await actors.start(spec())
    await reopen()
    assert (await actors.queue.run_state("run")).spec == spec()
    await actors.queue.open_run(spec(vocabulary=9))
    await reopen()
    assert (await actors.queue.run_state("run")).spec == spec(vocabulary=9)


async def test_every_state_of_a_row_survives(life: Life) -> None:
    actors, reopen = life
    await actors.start(spec(max_staleness=9.0))
    await actors.feed(tasks(10), cursor="ten")
    await actors.work(limit=8)
    await actors.train(0)
    await actors.take(1)
    await actors.work(limit=2)
    await actors.write(await actors.lease(limit=2))
    await actors.lease(limit=2)
    everywhere = {"settled": 4, "taken": 4, "ready": 2, "pending": 2, "leased": 2, "queued": 6}
    assert await actors.resident() == everywhere
    state = await actors.queue.run_state("run")
    await reopen()
    assert await actors.resident() == everywhere
    assert await actors.queue.run_state("run") == state
    assert state.cursor == "ten"


async def test_a_lease_goes_on_under_its_token(life: Life) -> None:
    actors, reopen = life
    await actors.start()
    await actors.feed(tasks(1))
    lease = await actors.lease()
    await reopen()
    assert await actors.queue.renew("run", "rollout", "w", [lease.rows[0].uid]) == []
    await actors.write(lease)
    await reopen()
    await actors.write(lease)
    assert await actors.resident() == {"pending": 2}


async def test_a_lease_whose_worker_died_with_the_queue_expires(life: Life) -> None:
    actors, reopen = life
    await actors.start(spec(lease_ttl_s=0.3))
    await actors.feed(tasks(1))
    await actors.lease(worker="dead")
    await reopen()
    lease = await actors.lease(worker="alive", wait_s=WAIT_S)
    assert {row.delivery for row in lease.rows} == {2}


async def test_a_batch_is_taken_once_across_a_restart(life: Life) -> None:
    actors, reopen = life
    await actors.start()
    await actors.feed(tasks(2))
    await actors.work()
    batch = await actors.take(0)
    await reopen()
    assert await actors.take(0) == batch
    await actors.settle(0)
    await reopen()
    assert await actors.take(0) == batch
    with pytest.raises(WaitTimeoutError):
        await actors.feed(tasks(1, start=2))
    await actors.publish(1)
    await reopen()
    assert await actors.feed(tasks(2, start=2)) == 2


async def test_the_end_of_data_is_known_after_a_restart(life: Life) -> None:
    actors, reopen = life
    await actors.start()
    await actors.feed(tasks(2))
    await actors.queue.close_feed("run")
    await actors.work()
    await actors.take(0)
    await reopen()
    with pytest.raises(EndOfDataError):
        await actors.take(1)


async def test_a_replay_keeps_its_order_across_a_restart(life: Life) -> None:
    actors, reopen = life
    await actors.start(spec(max_staleness=3.0))
    await actors.feed(tasks(4))
    late = await actors.lease(limit=2)
    await actors.work(limit=4)
    first = await actors.train(0)
    await actors.write(late)
    await actors.work()
    actors.epoch = (await actors.queue.acquire("run", "second")).epoch
    await actors.queue.rewind("run", epoch=actors.epoch, step=0)
    await reopen()
    assert batch_uids(await actors.take(0)) == batch_uids(first)


async def test_runs_are_apart(life: Life) -> None:
    actors, reopen = life
    other = Actors(actors.queue, run="run.eval")
    await actors.start()
    await other.start(spec("run.eval", gated=False, max_staleness=float("inf")))
    await actors.feed(tasks(1))
    await other.feed([task("q", run="run.eval")])
    await reopen()
    other.queue = actors.queue
    assert len((await other.lease()).rows) == 2
    assert await actors.resident() == {"queued": 2}
    assert (await actors.queue.run_state("run")).published == Version(1, 0)


async def test_a_waiting_call_gets_an_error_when_the_queue_closes(life: Life) -> None:
    actors, _ = life
    await actors.start()
    waiting = [
        asyncio.ensure_future(call)
        for call in (
            actors.lease(wait_s=WAIT_S),
            actors.take(0, wait_s=WAIT_S),
            Actors(actors.queue, run="later").lease("reward", wait_s=WAIT_S),
        )
    ]
    await asyncio.sleep(0.01)
    await actors.queue.close()
    for call in waiting:
        with pytest.raises(UnavailableError):
            await call
    with pytest.raises(UnavailableError):
        await actors.ledger()


async def test_a_queue_that_stood_still_does_not_hold_it_against_its_workers(life: Life) -> None:
    actors, _ = life
    await actors.start(spec(lease_ttl_s=0.2))
    await actors.feed(tasks(1))
    alive = await actors.lease(limit=1, worker="alive")
    await actors.lease(limit=1, worker="dead")
    time.sleep(0.6)  # noqa: ASYNC251 (the standstill)
    await asyncio.sleep(0.05)
    held = [row.uid for row in alive.rows]
    assert await actors.queue.renew("run", "rollout", "alive", held) == []
    await actors.write(alive)
    assert uids(await actors.lease(worker="other", wait_s=WAIT_S)) == ["t0.1.0"]
