"""The audit log agrees with the ledger, without being derived from it."""

from __future__ import annotations

from collections import Counter

import pytest

from meshrl.contract.types import Outcome
from meshrl.testing.contract.queue_actors import Actors, spec, tasks
from meshrl.transferqueue.model import records
from meshrl.transferqueue.model.records import AuditLog
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore


async def lived(store: MemoryStore) -> Actors:
    """Two batches trained, one row given up (and its sibling with it), one group resident."""
    actors = Actors(await TransferQueue.open(store))
    await actors.start(spec(max_attempts=1))
    for step in range(2):
        await actors.feed(tasks(2, start=2 * step))
        await actors.work()
        await actors.take(step)
        await actors.settle(step)
        await actors.publish(step + 1)
        await actors.commit(step + 1)
    await actors.feed(tasks(2, start=4))
    row = (await actors.lease(limit=1)).rows[0]
    await actors.queue.fail("run", "rollout", row.uid, row.token, Outcome.TIMEOUT, "slow")
    return actors


def sums_of(queue: TransferQueue) -> Counter[str]:
    return queue._runs["run"].audit_log.sums()


async def test_it_adds_up_to_the_ledger_also_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = {"admitted": 12, "trained": 8, "dead_lettered": 1, "filtered": 1}
    for limit in (1024, 2):
        monkeypatch.setattr(records, "MAX_RECORDS", limit)
        store = MemoryStore()
        queue = (await lived(store)).queue
        assert isinstance(queue, TransferQueue)
        assert sums_of(queue) == wanted
        await queue.close()
        again = await TransferQueue.open(store)
        assert sums_of(again) == wanted
        here = again._runs["run"].audit_log.open_rows()
        assert here == ({"t5": 2} if limit == 1024 else None)
        await again.close()


def test_nothing_noted_is_nothing_stored() -> None:
    assert AuditLog(0).sums() == Counter()
    assert AuditLog(0).open_rows() == Counter()
