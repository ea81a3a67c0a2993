"""The last rows go to the workers that finish them soonest; siblings go to one worker."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.contract.types import ROLLOUT_STAGE, Lease, Version
from meshrl.testing.contract.queue_actors import rollout_of, spec, tasks
from meshrl.transferqueue.model import fair_share
from meshrl.transferqueue.model.fair_share import BETWEEN_S, Division, FairShare, Holder
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore
from tests.simulation.loop import SimulatedLoop

FIRST = Version(1, 0)


@pytest.mark.parametrize(
    ("rows", "speeds", "slots", "shares"),
    [
        (100, [4, 1], [100, 100], [80, 20]),
        (100, [4, 1], [64, 100], [64, 36]),  # what one has no slots for goes to the other
        (100, [1, 1, 1], [10, 20, 100], [10, 20, 70]),
        (100, [4, 1], [64, 20], [64, 20]),  # more rows than slots: nobody is bounded
        (0, [4, 1], [64, 64], [0, 0]),
    ],
)
def test_rows_are_divided_by_speed_up_to_the_slots(
    rows: int, speeds: list[int], slots: list[int], shares: list[int]
) -> None:
    assert divided(rows, speeds, slots) == shares
    division = Division()
    parts = [division.add(pace, most, 0) for pace, most in zip(speeds, slots, strict=True)]
    if rows < sum(slots):
        assert [division.share(part, rows) for part in parts] == shares


def divided(rows: int, speeds: Sequence[float], slots: Sequence[int]) -> list[Fraction]:
    """Water-filling as its definition reads."""
    shares = [Fraction(0)] * len(speeds)
    left, open_ = Fraction(rows), set(range(len(speeds)))
    while open_ and left > 0:
        level = left / sum(Fraction(speeds[i]) for i in open_)
        full = {i for i in open_ if Fraction(speeds[i]) * level >= slots[i]}
        if not full:
            for i in open_:
                shares[i] = Fraction(speeds[i]) * level
            break
        for i in full:
            shares[i] = Fraction(slots[i])
            left -= slots[i]
        open_ -= full
    return shares


WORKER = st.builds(
    Holder,
    rows=st.integers(0, 8),
    slots=st.integers(0, 16),
    speed=st.sampled_from([0.0, 0.5, 1.0, 3.0, 40.0]),
    seen=st.floats(0.0, 20.0),
    waiting=st.integers(0, 1),
)


def plain_share(
    holders: dict[str, Holder], worker: str, ready: int, limit: int, now: float, silence_s: float
) -> int:
    """The formula, over everybody, without a shortcut."""
    mine = replace(holders.get(worker, Holder()), seen=now)
    mine.slots = mine.rows + limit
    known = [
        holder
        for holder in {**holders, worker: mine}.values()
        if holder.waiting or now - holder.seen <= silence_s
        if holder.speed and (holder.rows or holder.waiting or now - holder.seen <= BETWEEN_S)
    ]
    if mine not in known or len(known) < 2:
        return limit
    rows = ready + sum(holder.rows for holder in known)
    shares = divided(rows, [each.speed for each in known], [each.slots for each in known])
    wanted = math.ceil(shares[known.index(mine)]) - mine.rows
    return min(limit, max(wanted, 0 if mine.rows else 1))


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), WORKER),
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 60), st.integers(1, 16))),
)
def test_every_share_is_that_of_the_plain_formula(
    holders: dict[str, Holder], calls: list[tuple[str, int, int]]
) -> None:
    fair = FairShare()
    for name, holder in holders.items():
        mine = fair.holder(name, holder.seen)
        mine.rows, mine.slots, mine.speed = holder.rows, holder.slots, holder.speed
        mine.waiting = holder.waiting
    for now, (worker, ready, limit) in enumerate(calls, 20):
        expected = plain_share(fair._holders, worker, ready, limit, now, 5.0)
        assert fair.share(worker, ready, limit, now=now, silence_s=5.0) == expected


def measured(**speeds: float) -> FairShare:
    fair = FairShare()
    for name, speed in speeds.items():
        holder = fair.holder(name, 0.0)
        holder.finished([int(speed * 100)], 100.0)
        holder.slots, holder.waiting = 64, 1
    return fair


def test_a_slow_worker_gets_its_share_of_a_short_supply_and_never_nothing() -> None:
    fair = measured(fast=40.0, slow=10.0)
    assert fair.share("slow", 50, 64, now=1.0, silence_s=10) == 10
    fair.holder("slow", 1.0).rows = 10
    assert fair.share("slow", 40, 54, now=1.0, silence_s=10) == 0
    fair.holder("slow", 1.0).rows = 0
    assert fair.share("slow", 1, 64, now=1.0, silence_s=10) == 1


def test_while_there_are_rows_for_all_slots_nobody_is_bounded() -> None:
    fair = measured(fast=40.0, slow=10.0)
    assert fair.share("slow", 1000, 64, now=1.0, silence_s=10) == 64


def test_a_worker_that_holds_nothing_and_waits_for_nothing_is_not_reckoned_with() -> None:
    fair = measured(fast=40.0, slow=10.0)
    fast = fair.holder("fast", 0.0)
    fast.waiting = 0
    assert fair.share("slow", 50, 64, now=1.0, silence_s=10) == 10  # it may be about to ask again
    assert fair.share("slow", 50, 64, now=3.0, silence_s=10) == 64
    fast.hold(1)
    assert fair.share("slow", 50, 64, now=3.5, silence_s=10) == 11
    assert fair.share("slow", 50, 64, now=11.0, silence_s=10) == 64  # nothing was heard of it


def test_a_worker_that_has_finished_nothing_yet_is_not_bounded() -> None:
    fair = measured(fast=40.0, slow=10.0)
    assert fair.share("joiner", 50, 64, now=1.0, silence_s=10) == 64


@pytest.fixture
async def queue() -> AsyncIterator[TransferQueue]:
    opened = await TransferQueue.open(MemoryStore())
    await opened.open_run(spec(batch_groups=64, stages=(ROLLOUT_STAGE,), group_size=4))
    await opened.acquire("run", "trainer")
    await opened.publish("run", FIRST)
    yield opened
    await opened.close()


async def lease(queue: TransferQueue, worker: str, limit: int) -> Lease:
    return await queue.lease(
        ["run"], "rollout", worker=worker, limit=limit, version=FIRST, wait_s=5
    )


async def admit(queue: TransferQueue, count: int) -> None:
    await queue.admit("run", tasks(count, group_size=4), cursor="c", wait_s=5)


def groups_of(granted: Lease) -> list[tuple[str, int]]:
    return [(row.uid.task, row.uid.index) for row in granted.rows]


async def test_siblings_go_to_the_worker_that_has_the_first_of_them(queue: TransferQueue) -> None:
    await admit(queue, 4)
    assert groups_of(await lease(queue, "a", 1)) == [("t0", 0)]
    assert groups_of(await lease(queue, "b", 1)) == [("t1", 0)]
    assert groups_of(await lease(queue, "a", 2)) == [("t0", 1), ("t0", 2)]
    assert groups_of(await lease(queue, "b", 4)) == [
        ("t1", 1),
        ("t1", 2),
        ("t1", 3),
        ("t2", 0),
    ]
    assert groups_of(await lease(queue, "a", 2)) == [("t0", 3), ("t3", 0)]


async def test_nobody_waits_for_rows_that_another_worker_has_a_claim_to(
    queue: TransferQueue,
) -> None:
    await admit(queue, 2)
    await lease(queue, "a", 1)
    granted = await lease(queue, "b", 8)
    assert groups_of(granted) == [*(("t1", i) for i in range(4)), *(("t0", i) for i in (1, 2, 3))]


async def test_rows_that_came_back_need_not_go_to_where_they_failed(queue: TransferQueue) -> None:
    await admit(queue, 2)
    granted = await lease(queue, "a", 2)
    await queue.release("run", "rollout", {granted.rows[0].uid: granted.rows[0].token})
    assert groups_of(await lease(queue, "b", 1)) == [("t0", 0)]


async def test_one_that_waits_for_its_share_is_woken_by_its_own_write(
    queue: TransferQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_share, "WEIGHT", 0.0)  # the speeds below are the last word
    await admit(queue, 3)
    run = queue.open_runs[0]
    for name, tokens in (("fast", 400), ("slow", 1)):
        holder = run.fair_share.holder(name, run.clock())
        holder.finished([tokens], 1.0)
        holder.slots, holder.waiting = 64, 1
    granted = await lease(queue, "slow", 8)
    assert len(granted.rows) == 1
    waiting_call = asyncio.create_task(lease(queue, "slow", 7))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting_call.done()
    (row,) = granted.rows
    await queue.write_rows("run", "rollout", {row.uid: row.token}, [rollout_of(row, FIRST)])
    assert len((await waiting_call).rows) == 1


def looks(workers: int, rows: int) -> int:
    """Callbacks of a loop in which `rows` rows come one by one while `workers` workers, each with one row, wait."""

    async def run(loop: SimulatedLoop) -> int:
        queue = await TransferQueue.open(MemoryStore())
        await queue.open_run(spec(batch_groups=4 * workers, stages=(ROLLOUT_STAGE,), group_size=1))
        await queue.acquire("run", "trainer")
        await queue.publish("run", FIRST)

        async def work(number: int) -> None:
            held: list[Lease] = []
            while True:
                held.append(await lease(queue, f"w{number}", 4))
                if len(held) > 1:
                    (row, *_) = held.pop(0).rows
                    await asyncio.sleep(0.01)
                    written = [rollout_of(row, FIRST)]
                    await queue.write_rows("run", "rollout", {row.uid: row.token}, written)

        admitted = tasks(workers + rows, group_size=1)
        await queue.admit("run", admitted[:workers], cursor="c", wait_s=5)
        working = [loop.create_task(work(number)) for number in range(workers)]
        await asyncio.sleep(1)
        before = loop.events
        for task in admitted[workers:]:
            await queue.admit("run", [task], cursor="c", wait_s=5)
            await asyncio.sleep(0.1)
        seen = loop.events - before
        for each in working:
            each.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await queue.close()
        return seen

    return in_virtual_time(run)


def looks_behind(workers: int) -> int:
    """Callbacks until a worker has a row that waits without any, behind `workers` workers that hold their share."""

    async def run(loop: SimulatedLoop) -> int:
        queue = await TransferQueue.open(MemoryStore())
        await queue.open_run(spec(batch_groups=4 * workers, stages=(ROLLOUT_STAGE,), group_size=1))
        await queue.acquire("run", "trainer")
        await queue.publish("run", FIRST)
        admitted = tasks(2 * workers + 1, group_size=1)
        await queue.admit("run", admitted[:-1], cursor="c", wait_s=5)
        names = [f"w{number}" for number in range(workers)]
        for name in names:
            await lease(queue, name, 2)
        fair = queue.open_runs[0].fair_share
        for name in (*names, "idle"):
            fair.holder(name, loop.time()).finished([100], 1.0)
        waiting = [loop.create_task(lease(queue, name, 4)) for name in names]
        await asyncio.sleep(0.1)
        idle = loop.create_task(lease(queue, "idle", 4))
        await asyncio.sleep(0.1)
        before = loop.events
        await queue.admit("run", admitted[-1:], cursor="c", wait_s=5)
        assert (await idle).num_rows == 1
        seen = loop.events - before
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await queue.close()
        return seen

    return in_virtual_time(run)


def in_virtual_time(run: Callable[[SimulatedLoop], Awaitable[int]]) -> int:
    loop = SimulatedLoop(0)
    try:
        return loop.run_until_complete(run(loop))
    finally:
        loop.close()


def test_a_row_wakes_no_more_workers_the_more_of_them_wait() -> None:
    few, many = looks(10, 20), looks(160, 20)
    assert many < 1.5 * few
    few, many = looks_behind(10), looks_behind(160)
    assert many < 1.5 * few


def test_the_level_passes_few_workers_from_one_lease_to_the_next() -> None:
    moves: dict[int, float] = {}
    for workers in (50, 800):
        fair = measured(**{f"w{number}": 1.0 + number / 7 for number in range(workers)})
        for call in range(2 * workers):
            name = f"w{call * 37 % workers}"
            granted = fair.share(name, 16 * workers, 64, now=1.0, silence_s=10)
            fair.holder(name, 1.0).hold(granted - fair.holder(name, 1.0).rows)
        moves[workers] = fair._division.moves / (2 * workers)
    assert moves[800] < 2 * moves[50] + 4
