"""The timer of leases keeps the grants that have not ended, and few others."""

from __future__ import annotations

import asyncio
import gc

from meshrl.transferqueue.model.group import Grant, Group
from meshrl.transferqueue.model.records import TaskMetadata
from meshrl.transferqueue.model.waiting import SWEPT_GRANTS, Expiry


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
