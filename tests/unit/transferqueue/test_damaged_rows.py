"""Rows whose payload the store has damaged become dead letters, and what is around them continues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import numpy as np
import pytest

from meshrl.contract.errors import CorruptError, EndOfDataError, WaitTimeoutError
from meshrl.contract.rows import DAMAGED
from meshrl.contract.types import GroupPolicy
from meshrl.testing.contract.queue_actors import Actors, batch_uids, spec, tasks
from meshrl.testing.contract.queue_repeat_suite import more_of
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import Operation, Table
from meshrl.transferqueue.stores.memory import MemoryStore


async def damage(store: MemoryStore, holding: bytes) -> None:
    """Change one byte of the newest frame that has `holding` in it."""
    async with aclosing(store.export()) as pieces:
        records = [operation async for piece in pieces for operation in piece]
    *_, (key, value) = [
        (each.key, each.value)
        for each in records
        if each.table == Table.PAYLOAD and each.value is not None and holding in each.value
    ]
    await store.apply([Operation(Table.PAYLOAD, key, value[:-1] + bytes([value[-1] ^ 1]))])


def answers_to(task: str) -> bytes:
    return f"answer to run/{task}/".encode()


async def opened(store: MemoryStore, **changes: object) -> Actors:
    actors = Actors(await TransferQueue.open(store, cache_bytes=0))
    await actors.start(spec(**{"max_staleness": 3.0, **changes}))
    return actors


async def reasons(actors: Actors) -> dict[str, str]:
    return {str(each.uid): each.reason for each in await actors.queue.dead_letters("run")}


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    made = MemoryStore()
    yield made
    await made.close()


async def test_a_batch_is_answered_without_its_damaged_group_which_becomes_a_dead_letter(
    store: MemoryStore,
) -> None:
    actors = await opened(store, batch_groups=3)
    await actors.feed(tasks(6))
    await actors.work()
    await damage(store, answers_to("t1"))
    batch = await actors.take(0, groups=3)
    assert [group.task for group in batch.groups] == ["t0", "t2"]
    assert batch_uids(await actors.take(0, groups=3)) == batch_uids(batch)
    found = await reasons(actors)
    assert found and all("t1" in uid for uid in found)
    assert all(each.startswith("damaged in the store: task t1, frame ") for each in found.values())
    await actors.queue.fetch_rows("run", [row.uid for row in batch.rows], ["tokens", "reward"])
    await actors.settle(0)
    await actors.publish(1)
    assert [group.task for group in (await actors.take(1, groups=3)).groups] == ["t3", "t4", "t5"]
    await actors.commit(1)
    ledger = await actors.ledger()
    assert (ledger.admitted, ledger.trained) == (12, 4)
    assert sum(ledger.dead_lettered.values()) == len(found)
    assert await actors.queue.replay(
        "run", [each.uid for each in await actors.queue.dead_letters("run")]
    )
    await actors.queue.close()


async def test_callers_that_ask_for_one_batch_at_a_time_get_the_same_rows(
    store: MemoryStore,
) -> None:
    actors = await opened(store)
    await actors.feed(tasks(4))
    await actors.work()
    await damage(store, answers_to("t0"))
    one, other = await asyncio.gather(actors.take(0), actors.take(0))
    assert batch_uids(one) == batch_uids(other) == ["t1.0.0", "t1.1.0"]
    await actors.queue.close()


async def test_where_all_of_a_batch_is_damaged_others_are_taken(store: MemoryStore) -> None:
    actors = await opened(store)
    await actors.feed(tasks(4))
    await actors.work()
    for task in ("t0", "t1"):
        await damage(store, answers_to(task))
    assert [group.task for group in (await actors.take(0)).groups] == ["t2", "t3"]
    for task in ("t2", "t3"):
        await damage(store, answers_to(task))
    await actors.queue.close_feed("run")
    actors.epoch = (await actors.queue.acquire("run", "another")).epoch
    with pytest.raises(EndOfDataError):
        await actors.take(0)
    assert await actors.resident() == {}
    await actors.queue.close()


@pytest.mark.parametrize("settled", [False, True])
async def test_what_is_damaged_after_a_trainer_saw_it_leaves_when_it_is_taken_again(
    store: MemoryStore, settled: bool
) -> None:
    """The rows could be in the weights: they leave once a trainer has them that never learned from them."""
    actors = await opened(store)
    await actors.feed(tasks(4))
    await actors.work()
    batch = await actors.take(0)
    if settled:
        await actors.settle(0)
    await actors.queue.close()
    await damage(store, answers_to("t0"))
    actors.queue = await TransferQueue.open(store, cache_bytes=0)
    if not settled:
        assert batch_uids(await actors.take(0)) == batch_uids(batch)
        with pytest.raises(CorruptError, match="do not match their checksum"):
            await actors.queue.fetch_rows("run", [batch.rows[0].uid], ["tokens"])
    assert not await reasons(actors)
    actors.epoch = (await actors.queue.acquire("run", "another")).epoch
    await actors.queue.rewind("run", epoch=actors.epoch, step=0)
    assert batch_uids(await actors.take(0)) == ["t1.0.0", "t1.1.0"]
    assert await reasons(actors)
    await actors.ledger()
    await actors.queue.close()


@pytest.mark.parametrize("policy", [GroupPolicy.ALL, GroupPolicy.REPLACE_SIBLING])
async def test_rows_that_their_trainer_could_not_read_are_dead_letters_and_the_batch_goes_on(
    store: MemoryStore, policy: GroupPolicy
) -> None:
    actors = await opened(store, group_policy=policy)
    await actors.feed(tasks(2))
    await actors.work()
    unread, *others = (await actors.take(0)).rows
    for _ in range(2):  # the answer was lost, and the call is repeated
        await actors.queue.filter(
            "run", epoch=actors.epoch, uids=[unread.uid], reason=f"{DAMAGED}: frame 7"
        )
    assert await reasons(actors) == {str(unread.uid): "damaged in the store: frame 7"}
    kept = [str(row.uid) for row in others if row.uid.task != unread.uid.task]
    assert [str(row.uid) for row in (await actors.take(0)).rows] == kept
    await actors.settle(0)
    await actors.commit(1)
    ledger = await actors.ledger()
    assert (ledger.trained, sum(ledger.dead_lettered.values())) == (len(kept), 1)
    await actors.queue.close()


async def test_a_batch_of_which_nothing_could_be_read_can_be_settled(store: MemoryStore) -> None:
    actors = await opened(store)
    await actors.feed(tasks(2))
    await actors.work()
    uids = [row.uid for row in (await actors.take(0)).rows]
    await actors.queue.filter("run", epoch=actors.epoch, uids=uids, reason=f"{DAMAGED}: all")
    assert not (await actors.take(0)).rows
    await actors.settle(0)
    await actors.commit(1)
    assert await actors.resident() == {}
    await actors.queue.close()


async def test_a_damaged_row_is_replaced_where_the_run_replaces_dead_siblings(
    store: MemoryStore,
) -> None:
    actors = await opened(store, group_policy=GroupPolicy.REPLACE_SIBLING)
    await actors.feed(tasks(2))
    lease = await actors.lease()
    for row in lease.rows:  # a frame for each row
        await actors.write(lease, rows=[row])
    await actors.write(await actors.lease("reward"))
    await damage(store, b"answer to run/t0/1")
    assert batch_uids(await actors.take(0)) == ["t1.0.0", "t1.1.0"]
    await actors.settle(0)
    await actors.publish(1)
    await actors.queue.close()
    actors.queue = await TransferQueue.open(store, cache_bytes=0)
    with pytest.raises(WaitTimeoutError):
        await actors.take(1, groups=1)
    await actors.work()
    assert batch_uids(await actors.take(1, groups=1)) == ["t0.0.0", "t0.1.1"]
    assert list(await reasons(actors)) == ["run/t0/1.0"]
    await actors.queue.close()


async def test_what_was_appended_is_checked_before_the_next_worker_gets_it(
    store: MemoryStore,
) -> None:
    actors = await opened(store)
    await actors.feed(tasks(2))
    lease = await actors.lease()
    for group in lease.blocks:
        await actors.queue.append("run", "rollout", [more_of(group, 0, 3)])
    await actors.queue.release("run", "rollout", {row.uid: row.token for row in lease.rows})
    await damage(store, np.arange(100, 103, dtype=np.int32).tobytes())
    (left,) = (await actors.lease()).blocks
    (reason, *_) = (await reasons(actors)).values()
    assert reason.startswith("damaged in the store: ")
    assert left.progress
    await actors.queue.close()


async def test_a_task_of_which_nothing_is_left_is_damaged_and_has_not_left(
    store: MemoryStore,
) -> None:
    actors = await opened(store)
    await actors.feed(tasks(1))
    await actors.queue.close()
    [key] = [key for key in store._tables[Table.PAYLOAD] if key.startswith(b"t")]
    await store.apply([Operation(Table.PAYLOAD, key, b"")])
    actors.queue = await TransferQueue.open(store, cache_bytes=0)
    with pytest.raises(WaitTimeoutError):
        await actors.lease()
    assert {
        "0 bytes do not match their checksum" in why for why in (await reasons(actors)).values()
    } == {True}
