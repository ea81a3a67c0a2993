"""Expiry of a lease, or none: silence, a broken connection, a queue that cannot receive renewals; its timer."""

from __future__ import annotations

import asyncio
import gc

import pytest

from meshrl.contract.errors import WaitTimeoutError
from meshrl.testing.contract.queue_actors import WAIT_S, Actors, spec, tasks
from meshrl.transferqueue.model.group import Grant, Group
from meshrl.transferqueue.model.records import TaskMetadata
from meshrl.transferqueue.model.waiting import SWEPT_GRANTS, Expiry
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from ...simulation.virtual_time import in_virtual_time


async def started(**changes: float) -> tuple[TransferQueue, Actors]:
    """A queue and a run with a group of two rows."""
    queue = await TransferQueue.open(MemoryStore())
    actors = Actors(queue)
    await actors.start(spec(**changes))
    await actors.feed(tasks(1))
    return queue, actors


@in_virtual_time
async def test_rows_that_never_reached_a_worker_that_is_there_were_no_attempt() -> None:
    queue, actors = await started(lease_ttl_s=0.05, max_attempts=1)
    with queue.heartbeat("w"):
        for _ in range(3):
            lease = await actors.lease(worker="w", wait_s=WAIT_S)
            assert [row.delivery for row in lease.rows] == [1, 1]
    assert not await queue.dead_letters("run")


@in_virtual_time
async def test_rows_of_a_life_that_ended_were_an_attempt_though_another_has_begun() -> None:
    queue, actors = await started(lease_ttl_s=0.5, max_attempts=2)
    with queue.heartbeat("w"):
        await actors.lease(worker="w")
        await asyncio.sleep(0.01)  # two moments
    with queue.heartbeat("w"):
        again = await actors.lease(worker="w", wait_s=WAIT_S)
    assert [row.delivery for row in again.rows] == [2, 2]


@in_virtual_time
async def test_silence_after_a_renewal_is_an_attempt() -> None:
    queue, actors = await started(lease_ttl_s=0.05, max_attempts=2)
    with queue.heartbeat("w"):
        lease = await actors.lease(worker="w")
        await queue.renew("run", "rollout", "w", [row.uid for row in lease.rows])
        again = await actors.lease(worker="w", wait_s=WAIT_S)
    assert [row.delivery for row in again.rows] == [2, 2]


@in_virtual_time
async def test_a_worker_that_comes_back_soon_keeps_its_rows() -> None:
    queue, actors = await started(lease_ttl_s=3600)
    with queue.heartbeat("w"):
        back, gone = (await actors.lease(worker="w")).rows
    with queue.heartbeat("w"):
        assert await queue.renew("run", "rollout", "w", [back.uid]) == []
        again = await actors.lease(worker="other", wait_s=WAIT_S)
        assert [row.uid for row in again.rows] == [gone.uid]
        assert await queue.renew("run", "rollout", "w", [back.uid]) == []


@in_virtual_time
async def test_the_end_of_a_predecessor_costs_its_successor_nothing() -> None:
    queue, actors = await started(lease_ttl_s=3600)
    old = queue.heartbeat("w")
    old.__enter__()
    (before,) = (await actors.lease(worker="w", limit=1)).rows
    await asyncio.sleep(0.01)  # two moments
    with queue.heartbeat("w"):
        await asyncio.sleep(0.01)
        (after,) = (await actors.lease(worker="w", limit=1)).rows
        old.__exit__(None, None, None)
        again = await actors.lease(worker="other", wait_s=WAIT_S)
        assert [row.uid for row in again.rows] == [before.uid]
        assert await queue.renew("run", "rollout", "w", [after.uid]) == []


@in_virtual_time
async def test_a_queue_that_ends_ends_no_lease() -> None:
    queue, actors = await started(lease_ttl_s=0.05)
    lease = await actors.lease(worker="w")
    queue.end_no_lease()
    with pytest.raises(WaitTimeoutError):
        await actors.lease(worker="other", wait_s=0.5)
    await actors.write(lease)


def granted(expiry: Expiry, *, ttl_s: float) -> Grant:
    group = Group.fresh(
        "run",
        0,
        0,
        "task",
        metadata=TaskMetadata(),
        task_bytes=0,
        attempts=[0],
        stages=1,
        now=0.0,
    )
    return Grant(group, 0, 1, "worker", 1, 0.0, expiry.now() + ttl_s)


def grants_alive() -> int:
    # Not isinstance: it asks other libraries' lazy objects what they are.
    return sum(type(each) is Grant for each in gc.get_objects())


async def test_grants_that_ended_are_let_go_long_before_their_time_to_live() -> None:
    expiry = Expiry(lambda grant: None)
    before = grants_alive()
    for _ in range(10 * SWEPT_GRANTS):
        grant = granted(expiry, ttl_s=3600)
        expiry.watch(grant)
        grant.mask = 0
    assert grants_alive() - before <= SWEPT_GRANTS + 1
    expiry.clear()


async def test_a_grant_that_has_not_ended_expires_however_many_did() -> None:
    expired: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
    expiry = Expiry(expired.set_result)
    open_grant = granted(expiry, ttl_s=0.05)
    expiry.watch(open_grant)
    for _ in range(3 * SWEPT_GRANTS):
        grant = granted(expiry, ttl_s=0.01)
        expiry.watch(grant)
        grant.mask = 0
    assert await asyncio.wait_for(expired, 60) is open_grant
