"""Which tasks that left the queue still knows, and the bound by tokens."""

from __future__ import annotations

import pytest

from meshrl.contract.errors import WaitTimeoutError
from meshrl.testing.contract.queue_actors import Actors, spec, tasks
from meshrl.transferqueue.model import records
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore


async def trained(actors: Actors, start: int, steps: int) -> None:
    """Batches of two groups each, through to the commit."""
    for step in range(start, start + steps):
        await actors.feed(tasks(2, start=2 * step))
        await actors.work()
        await actors.take(step)
        await actors.settle(step)
        await actors.publish(step + 1)
        await actors.commit(step + 1)


async def test_tasks_that_left_long_ago_are_forgotten_also_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "REMEMBERED", 4)
    store = MemoryStore()
    actors = Actors(await TransferQueue.open(store))
    await actors.start()
    await trained(actors, 0, 4)
    await actors.queue.close()

    actors.queue = queue = await TransferQueue.open(store)
    await trained(actors, 4, 1)
    # t2 .. t7 had left when t8 and t9 came: the last four are known, and change nothing.
    assert await queue.admit("run", tasks(4, start=4), cursor="", wait_s=0) == 4
    assert (await queue.ledger("run")).admitted == 20
    assert len(queue._runs["run"].known_tasks) == 6
    await actors.feed(tasks(1, start=0))
    assert (await queue.ledger("run")).admitted == 22
    await queue.close()


async def test_new_groups_wait_while_the_rows_hold_too_many_tokens() -> None:
    actors = Actors(await TransferQueue.open(MemoryStore()))
    await actors.start(spec(max_staleness=9.0, resident_tokens=24))
    await actors.feed(tasks(2))
    await actors.work()  # four rows of six tokens
    assert await actors.queue.admit("run", tasks(3, start=1), cursor="", wait_s=0) == 1
    with pytest.raises(WaitTimeoutError, match="24 of 24 tokens"):
        await actors.queue.admit("run", tasks(1, start=2), cursor="", wait_s=0)
    await actors.take(0)
    await actors.settle(0)
    await actors.publish(1)
    assert await actors.queue.admit("run", tasks(1, start=2), cursor="", wait_s=0) == 1
    await actors.queue.close()
