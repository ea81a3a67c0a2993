"""Dead letters are bounded: the oldest are dropped with what was kept for them, and stay counted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from meshrl.contract.types import Outcome
from meshrl.testing.contract.queue_actors import Actors, spec, tasks
from meshrl.transferqueue.admin import audit
from meshrl.transferqueue.model.specs import Quota
from meshrl.transferqueue.queue import MOST_REASON, TransferQueue
from meshrl.transferqueue.store import Table
from meshrl.transferqueue.stores.memory import MemoryStore


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    made = MemoryStore()
    yield made
    await made.close()


async def die(actors: Actors, start: int) -> None:
    """A row of each of four tasks dies; its sibling leaves as filtered."""
    await actors.feed(tasks(4, start))
    lease = await actors.lease()
    for row in lease.rows[::2]:
        await actors.queue.fail("run", "rollout", row.uid, row.token, Outcome.TIMEOUT, "no")


async def letters(actors: Actors) -> list[str]:
    return [each.uid.task for each in await actors.queue.dead_letters("run")]


async def stored_tasks(store: MemoryStore) -> int:
    async with aclosing(store.export()) as pieces:
        keys = [(each.table, each.key[:1]) async for piece in pieces for each in piece]
    return keys.count((Table.PAYLOAD, b"t"))


@pytest.mark.parametrize("quota", [Quota(dead_letters=6), Quota(dead_letter_bytes=2500)])
async def test_the_oldest_letters_are_dropped_with_their_tasks_and_stay_counted(
    store: MemoryStore, quota: Quota, caplog: pytest.LogCaptureFixture
) -> None:
    actors = Actors(await TransferQueue.open(store, quota=quota))
    await actors.start(spec(batch_groups=4, max_attempts=1))
    for start in range(0, 40, 4):
        await die(actors, start)
    kept = await letters(actors)
    assert 0 < len(kept) <= 20
    assert kept[-1] == "t39" and "t0" not in kept
    assert await stored_tasks(store) == len({*kept})
    ledger = await actors.ledger()
    assert sum(ledger.dead_lettered.values()) == 40
    (run,) = actors.queue.open_runs
    assert run.record.dropped_letters == 40 - len(kept)
    assert caplog.text.count("the oldest dead letters are dropped") == 1
    async with aclosing(store.export()) as pieces:
        assert not (await audit(pieces)).problems

    await actors.queue.close()
    actors.queue = await TransferQueue.open(store, quota=quota)
    (run,) = actors.queue.open_runs
    assert run.record.dropped_letters == 40 - len(kept)
    assert await letters(actors) == kept
    replayed = [each.uid for each in await actors.queue.dead_letters("run")]
    assert await actors.queue.replay("run", replayed) == len(kept)
    assert await letters(actors) == []
    before = (await actors.ledger()).admitted
    await actors.feed(tasks(1))
    assert (await actors.ledger()).admitted == before, "a task whose letter was dropped is known"
    await actors.queue.close()


async def test_a_reason_is_cut_before_anything_keeps_it(store: MemoryStore) -> None:
    queue = await TransferQueue.open(store)
    actors = Actors(queue)
    await actors.start(spec(group_size=1))
    await actors.feed(tasks(1, group_size=1))
    for _ in range(3):
        (row,) = (await actors.lease()).rows
        await queue.fail("run", "rollout", row.uid, row.token, Outcome.TIMEOUT, "a" * 9999, True)
        (run,) = queue.open_runs
        kept = [fault.reason for group in run.groups.values() for fault in group.lasting.values()]
        assert kept == ["a" * MOST_REASON + "…"] * len(kept)
    (letter,) = await queue.dead_letters("run")
    assert letter.reason == "a" * MOST_REASON + "…"
    await queue.close()
