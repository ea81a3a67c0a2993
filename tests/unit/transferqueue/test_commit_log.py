"""Group commit: what is acknowledged is durable; what is not acknowledged never happened."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from meshrl.contract.errors import CapacityError, InfraError
from meshrl.testing.contract.queue_actors import WAIT_S, Actors, spec, tasks
from meshrl.transferqueue.queue import TransferQueue
from tests.doubles.gated_store import GatedStore


@pytest.fixture
async def actors() -> AsyncIterator[Actors]:
    actors = Actors(await TransferQueue.open(GatedStore(), recovery_pause_s=0.01))
    await actors.start(spec(max_staleness=99.0))
    yield actors
    store_of(actors).gate.set()
    await actors.queue.close()


def store_of(actors: Actors) -> GatedStore:
    store = actors.queue._store
    assert isinstance(store, GatedStore)
    return store


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_nothing_is_acknowledged_before_it_is_durable(actors: Actors) -> None:
    store_of(actors).gate.clear()
    admitted = asyncio.ensure_future(actors.feed(tasks(1)))
    leased = asyncio.ensure_future(actors.lease())
    ledger = asyncio.ensure_future(actors.ledger())
    await turns()
    assert not any(call.done() for call in (admitted, leased, ledger))
    store_of(actors).gate.set()
    assert await admitted == 1
    assert len((await leased).rows) == 2
    assert (await ledger).admitted == 2


async def test_transitions_that_meet_a_commit_share_the_next_one(actors: Actors) -> None:
    store = store_of(actors)
    store.gate.clear()
    before = store.commits
    first = asyncio.ensure_future(actors.feed(tasks(1)))
    await turns()
    calls = [asyncio.ensure_future(actors.feed(tasks(1, start=n))) for n in range(1, 50)]
    await turns()
    store.gate.set()
    await asyncio.gather(first, *calls)
    assert store.commits - before == 2


async def test_a_refused_commit_never_happened_and_the_queue_goes_on(actors: Actors) -> None:
    await actors.feed(tasks(1))
    lease = await actors.lease()
    store_of(actors).refusal = CapacityError("full", free=7)
    with pytest.raises(CapacityError, match="full") as refused:
        await actors.write(lease)
    assert refused.value.details["free"] == "7"
    with pytest.raises(CapacityError):
        await actors.feed(tasks(1, start=1))
    store_of(actors).refusal = None
    assert await actors.resident() == {"leased": 2}
    await actors.write(lease)
    assert await actors.feed(tasks(1, start=1)) == 1
    assert await actors.resident() == {"pending": 2, "queued": 2}


async def test_everything_staged_behind_a_refused_commit_is_refused_with_it(
    actors: Actors,
) -> None:
    store = store_of(actors)
    store.gate.clear()
    store.refusal = CapacityError("full")
    calls = [asyncio.ensure_future(actors.feed(tasks(1)))]
    await turns()
    calls.append(asyncio.ensure_future(actors.feed(tasks(1, start=1))))
    await turns()
    store.gate.set()
    for call in calls:
        with pytest.raises(CapacityError):
            await call
    store.refusal = None
    assert (await actors.ledger()).admitted == 0


async def test_waits_outlive_a_refused_commit(actors: Actors) -> None:
    leasing = asyncio.ensure_future(actors.lease("reward", wait_s=WAIT_S))
    taking = asyncio.ensure_future(actors.take(0, groups=1, wait_s=WAIT_S))
    await turns()
    store_of(actors).refusal = CapacityError("full")
    with pytest.raises(CapacityError):
        await actors.feed(tasks(1))
    store_of(actors).refusal = None
    await actors.feed(tasks(1))
    await actors.write(await actors.lease())
    await actors.write(await leasing)
    assert len((await taking).rows) == 2


async def test_a_lease_expires_after_a_refused_commit_too(actors: Actors) -> None:
    await actors.queue.open_run(spec("short", lease_ttl_s=0.05, gated=False))
    short = Actors(actors.queue, run="short")
    await short.feed(tasks(1, run="short"))
    await short.lease(worker="dead")
    store_of(actors).refusal = CapacityError("full")
    with pytest.raises(CapacityError):
        await actors.feed(tasks(1))
    store_of(actors).refusal = None
    assert (await short.lease(wait_s=WAIT_S)).rows[0].delivery == 2


async def test_a_store_that_cannot_be_read_back_is_tried_until_it_can(
    actors: Actors, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_of(actors)
    store.refusal = store.unreadable = InfraError("the disk went away")
    with caplog.at_level(logging.ERROR), pytest.raises(InfraError, match="went away"):
        await actors.feed(tasks(1))
    with pytest.raises(InfraError, match="went away"):
        await actors.feed(tasks(1))
    store.refusal = store.unreadable = None
    while True:
        try:
            assert await actors.feed(tasks(1)) == 1
            break
        except InfraError:
            await asyncio.sleep(0.01)
    assert "cannot be read back" in caplog.text


async def test_a_lease_whose_caller_went_away_gives_its_rows_back(actors: Actors) -> None:
    await actors.feed(tasks(1))
    store_of(actors).gate.clear()
    leasing = asyncio.ensure_future(actors.lease())
    await turns()
    leasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leasing
    store_of(actors).gate.set()
    assert await actors.resident() == {"queued": 2}
    assert {row.delivery for row in (await actors.lease()).rows} == {1}
