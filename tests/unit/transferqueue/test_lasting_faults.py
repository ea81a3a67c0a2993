"""Faults that another try would meet again: a row is tried twice, and sixteen such rows end the wait for a batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from meshrl.contract.errors import UserError, WaitTimeoutError
from meshrl.contract.types import GroupPolicy, LeasedRow, Outcome
from meshrl.testing.contract.queue_actors import WAIT_S, Actors, spec, tasks
from meshrl.transferqueue.model.failures import BATCHES_DEAD, FEWEST_DEAD
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

NONE = "compute_score returned NoneType None, not a number"


@pytest.fixture
async def actors() -> AsyncIterator[Actors]:
    actors = Actors(await TransferQueue.open(MemoryStore()))
    yield actors
    await actors.queue.close()


async def begin(actors: Actors, groups: int, **changes: object) -> None:
    roomy = {"max_staleness": float("inf"), "resident_batches": 100}
    changes = {"group_size": 1, "batch_groups": 4, **roomy, **changes}
    await actors.start(spec(**changes))
    await actors.feed(tasks(groups, group_size=changes["group_size"]))
    await actors.write(await actors.lease("rollout"))


async def fail(
    actors: Actors,
    row: LeasedRow,
    reason: str = NONE,
    *,
    stage: str = "reward",
    lasting: bool = True,
) -> None:
    await actors.queue.fail("run", stage, row.uid, row.token, Outcome.INFRA_FAULT, reason, lasting)


async def give_up(actors: Actors, rows: int, reason: str = NONE) -> None:
    """Let rows meet the same fault twice each."""
    for _ in range(2):
        for row in (await actors.lease("reward", rows)).rows:
            await fail(actors, row, reason.format(row.uid.task))


async def dead(actors: Actors) -> int:
    return sum((await actors.ledger()).dead_lettered.values())


async def test_a_wait_for_a_batch_ends_with_the_sixteenth_row_that_meets_the_same(
    actors: Actors,
) -> None:
    await begin(actors, 20)
    waiting = asyncio.ensure_future(actors.take(0, groups=4, wait_s=WAIT_S))
    await give_up(actors, FEWEST_DEAD - 1)
    await asyncio.sleep(0)
    assert not waiting.done()
    await give_up(actors, 1)
    with pytest.raises(UserError, match=rf"^run run: 16 rows were dead-lettered while .*{NONE}"):
        await waiting
    assert await dead(actors) == FEWEST_DEAD


async def test_what_is_the_rows_own_in_a_reason_makes_no_other_fault(actors: Actors) -> None:
    await begin(actors, 20)
    await give_up(actors, FEWEST_DEAD, "ValueError: no number in {} at /tmp/reward.py:3 in score")
    with pytest.raises(UserError, match="no number in t15"):
        await actors.take(0, groups=4)


@pytest.mark.parametrize("policy", [GroupPolicy.ALL, GroupPolicy.REPLACE_SIBLING])
async def test_a_row_that_meets_the_same_again_is_not_tried_a_third_time(
    actors: Actors, policy: GroupPolicy
) -> None:
    await begin(actors, 1, group_policy=policy)
    await give_up(actors, 1)
    (letter,) = await actors.queue.dead_letters("run")
    assert (letter.attempts, letter.reason) == (2, NONE)


async def test_another_fault_each_time_is_tried_as_often_as_any(actors: Actors) -> None:
    await begin(actors, 1)
    for reason in ("KeyError: 1", "KeyError: 2", "KeyError: 1"):
        assert not await dead(actors)
        (row,) = (await actors.lease("reward")).rows
        await fail(actors, row, reason)
    assert await dead(actors) == 1


async def test_a_stage_that_samples_may_draw_something_else(actors: Actors) -> None:
    await actors.start(spec(group_size=1, max_staleness=float("inf")))
    await actors.feed(tasks(1, group_size=1))
    for _ in range(3):
        assert not await dead(actors)
        (row,) = (await actors.lease("rollout")).rows
        await fail(actors, row, stage="rollout")
    assert await dead(actors) == 1


async def test_sixteen_rows_that_cannot_be_sampled_end_the_wait_as_well(actors: Actors) -> None:
    await actors.start(spec(group_size=1, max_staleness=float("inf"), batch_groups=20))
    await actors.feed(tasks(20, group_size=1))
    for _ in range(3):
        for row in (await actors.lease("rollout", FEWEST_DEAD)).rows:
            await fail(actors, row, "UserError: request {} has token 741", stage="rollout")
    with pytest.raises(UserError, match="rollout: UserError"):
        await actors.take(0, groups=20)


async def test_a_row_that_is_finished_meanwhile_shows_that_others_may_be(actors: Actors) -> None:
    """However the rows that fail stand among the others, and although they meet when they are tried again."""
    await begin(actors, 100, batch_groups=50)
    for _ in range(2):
        lease = await actors.lease("reward", 25)
        for row in lease.rows[:20]:
            await fail(actors, row)
        await actors.write(lease, rows=lease.rows[20:])
    assert await dead(actors) == 20
    with pytest.raises(WaitTimeoutError):
        await actors.take(0, groups=50)


async def test_two_batches_of_such_rows_are_enough_whatever_is_finished(actors: Actors) -> None:
    await begin(actors, 50, batch_groups=10)
    for number in range(BATCHES_DEAD * 10):
        with pytest.raises(WaitTimeoutError):
            await actors.take(0, groups=10, name=f"b{number}")  # no wait for one that lasts
        await give_up(actors, 1)
        if number % 5 == 4:
            await actors.write(await actors.lease("reward", 1))
    with pytest.raises(UserError, match=r"^run run: 20 rows were dead-lettered while the trainer"):
        await actors.take(0, groups=10)


async def test_a_batch_that_is_taken_begins_the_count_anew(actors: Actors) -> None:
    await begin(actors, 100, batch_groups=8)
    for step in range(6):
        await give_up(actors, 9)
        await actors.write(await actors.lease("reward", 2))
        batch = await actors.take(step, groups=2)
        assert len(batch.groups) == 2


async def test_what_may_pass_ends_no_wait(actors: Actors) -> None:
    """An engine that is gone, a judge that is out of reach, a lease that expired."""
    await begin(actors, 90)
    for _ in range(3):
        for row in (await actors.lease("reward", 90)).rows:
            await fail(actors, row, "the judge is out of reach", lasting=False)
    assert await dead(actors) == 90
    for _ in range(3):
        with pytest.raises(WaitTimeoutError):
            await actors.take(0, groups=4)


async def test_what_may_pass_ends_a_wait_when_it_lasts(actors: Actors) -> None:
    """A batch of rows that died, whatever of, since a trainer asked for the same batch a second time."""
    await begin(actors, 40, batch_groups=18)
    for _ in range(2):
        with pytest.raises(WaitTimeoutError):
            await actors.take(0, groups=18)
    for limit, done in ((17, False), (1, True)):
        for _ in range(3):
            for row in (await actors.lease("reward", limit)).rows:
                await fail(actors, row, "the judge is out of reach", lasting=False)
        with pytest.raises(UserError if done else WaitTimeoutError):
            await actors.take(0, groups=18)
    with pytest.raises(WaitTimeoutError):
        await actors.take(0, groups=18, name="another")


async def test_a_trainer_that_comes_anew_is_told_of_nothing_before_it(actors: Actors) -> None:
    await begin(actors, 40)
    await give_up(actors, FEWEST_DEAD)
    with pytest.raises(UserError):
        await actors.take(0, groups=4)
    actors.epoch = (await actors.queue.acquire("run", "t")).epoch
    with pytest.raises(WaitTimeoutError):
        await actors.take(0, groups=4)
    await actors.write(await actors.lease("reward", 4))
    assert len((await actors.take(0, groups=4)).groups) == 4


async def test_an_evaluation_does_not_wait_for_rows_that_have_died(actors: Actors) -> None:
    await begin(actors, 3, gated=False)
    waiting = asyncio.ensure_future(actors.take(0, groups=3, wait_s=WAIT_S))
    await give_up(actors, 1)
    with pytest.raises(WaitTimeoutError, match="fewer than 3 groups"):
        await waiting
    await actors.write(await actors.lease("reward"))
    assert len((await actors.take(0, groups=2, wait_s=WAIT_S)).groups) == 2
