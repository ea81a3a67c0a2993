"""Several shards: where tasks live, what batches are made of, what is left when somebody dies between two shards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshrl.contract.errors import FencedError, UnavailableError, UserError, WaitTimeoutError
from meshrl.contract.types import Lease, RunSpec
from meshrl.testing.contract.queue_actors import WAIT_S, Actors, batch_uids, spec, tasks
from meshrl.transferqueue.sharding import GroupCounts, Sampled, ShardedQueue, ShardQueue
from meshrl.transferqueue.sharding.batches import plan_batch
from meshrl.transferqueue.sharding.run_shards import RunShards, owner
from meshrl.transferqueue.sharding.shard import BatchPlan, parse_batch_name
from meshrl.transferqueue.stores.disk import DiskStore
from meshrl.transferqueue.stores.memory import MemoryStore

TASKS = [f"task-{number}" for number in range(6000)]


class Failing:
    """A shard that is away for the next call of one method, before or after it has done what it was asked for."""

    def __init__(self, shard: ShardQueue, method: str, *, after: bool = False) -> None:
        self._shard, self._method, self._after = shard, method, after
        self.armed = True

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._shard, name)
        if name != self._method or not self.armed:
            return found
        self.armed = False

        async def call(*given: Any, **named: Any) -> Any:
            if self._after:
                await found(*given, **named)
            raise UnavailableError("killed")

        return call


@pytest.fixture
async def shards() -> AsyncIterator[list[ShardQueue]]:
    opened = [await ShardQueue.open(MemoryStore()) for _ in range(3)]
    yield opened
    for shard in opened:
        await shard.close()


def open_groups(shards: list[ShardQueue]) -> int:
    return sum(shard._runs["run"].unconsumed for shard in shards)


# --- where tasks live


def test_the_place_of_a_task_is_the_same_in_every_process_and_release() -> None:
    assert [owner(f"t{number}", 3) for number in range(12)] == [1, 0, 1, 0, 1, 0, 2, 1, 1, 0, 0, 2]


def test_tasks_are_spread_evenly() -> None:
    counts = Counter(owner(task, 4) for task in TASKS)
    assert all(abs(count - len(TASKS) / 4) < 0.08 * len(TASKS) / 4 for count in counts.values())


def test_a_shard_more_moves_its_share_of_tasks_and_only_to_itself() -> None:
    moved = [task for task in TASKS if owner(task, 3) != owner(task, 4)]
    assert {owner(task, 4) for task in moved} == {3}
    assert abs(len(moved) - len(TASKS) / 4) < 0.08 * len(TASKS) / 4


def test_a_task_is_looked_for_wherever_it_may_have_been_admitted() -> None:
    members = RunShards(2, 4)
    for task in TASKS[:200]:
        homes = list(members.homes(task))
        assert homes[0] == members.home(task) == owner(task, 4)
        assert homes[-1] == owner(task, 2)
        assert len(set(homes)) == len(homes)
    assert RunShards.parse(str(members)) == members


# --- what a batch is made of


def group_counts(fresh: int, *replays: tuple[int, int]) -> GroupCounts:
    return GroupCounts(
        plan="",
        replays=replays,
        fresh=fresh,
        unfinished=0,
        feed_closed=False,
        next_round=max((at for at, _ in replays), default=0) + 1,
    )


@pytest.mark.parametrize(
    ("shards", "count", "expected"),
    [
        ([group_counts(8), group_counts(8)], 8, "1/0:4.1:4"),
        ([group_counts(1), group_counts(9)], 8, "1/0:1.1:7"),
        ([group_counts(0), group_counts(9)], 8, "1/1:8"),
        ([group_counts(2), group_counts(1)], 8, "1/0:2.1:1"),
        ([group_counts(8), group_counts(8), group_counts(8)], 2, "1/1:1.2:1"),
        ([group_counts(9, (3, 5)), group_counts(9, (3, 3))], 8, "4/0:5.1:3"),
        ([group_counts(9, (4, 5)), group_counts(9, (3, 3))], 4, "5/1:3.0:1"),
        ([group_counts(9, (3, 1)), group_counts(9, (3, 1))], 4, "4/0:1.1:1.0:1.1:1"),
        ([group_counts(0, (3, 1), (4, 2)), group_counts(0, (3, 2))], 9, "5/0:1.1:2.0:2"),
    ],
)
def test_replays_come_first_by_round_then_even_shares(
    shards: list[GroupCounts], count: int, expected: str
) -> None:
    assert str(plan_batch(shards, count, step=1)) == expected


@pytest.mark.parametrize(
    ("complete", "expected"),
    [
        ((0, 9), "1/0:3.1:5!2"),
        ((1, 10), "1/0:2.1:6!2"),
        ((0, 14), "1/1:8!2"),
        ((2, 2), "1/0:4.1:4"),
    ],
)
def test_a_shard_gives_at_least_what_the_next_batch_would_get_too_late(
    complete: tuple[int, int], expected: str
) -> None:
    """Of the groups from step 2 on, a later batch holds 4: the others are due, wherever they are."""
    shards = [
        replace(group_counts(9), sampled=(Sampled(2, 4, n, n), Sampled(3, 30, 2, 2)))
        for n in complete
    ]
    plan = str(plan_batch(shards, 8, step=2))
    assert plan == expected


def test_a_plan_is_read_back_from_the_id_of_its_batch() -> None:
    plan = BatchPlan(7, ((1, 3), (0, 2), (1, 1)))
    assert parse_batch_name(plan.name("run/1.2#x")) == ("run/1.2#x", plan)
    due = replace(plan, due_by=4)
    assert parse_batch_name(due.name("run/1.2")) == ("run/1.2", due)
    assert plan.shares == {1: 4, 0: 2}
    assert plan.in_order({0: "ab", 1: "uvwx"}) == tuple("uvwabx")
    assert parse_batch_name("run/1.2#x") == ("run/1.2#x", None)


async def test_what_a_plan_calls_due_comes_before_what_the_sampler_prefers() -> None:
    shard = await ShardQueue.open(MemoryStore())
    actors = Actors(shard)
    await actors.start(spec(sampler="fresh_first", max_staleness=3.0, batch_groups=2))
    await actors.feed(tasks(1))
    await actors.work()
    await actors.publish(1)
    await actors.feed(tasks(2, 1))
    await actors.work()
    plans = {"fresh": BatchPlan(1, ((0, 1),)), "due": BatchPlan(2, ((0, 1),), due_by=0)}
    first = {
        name: await shard.take(
            "run", epoch=actors.epoch, step=1, groups=1, batch_id=plan.name(name), wait_s=0.0
        )
        for name, plan in plans.items()
    }
    assert [batch.groups[0].task for batch in first.values()] == ["t1", "t0"]
    await shard.close()


# --- somebody dies between two shards


async def test_a_batch_that_was_half_taken_is_the_same_batch_when_taken_again(
    shards: list[ShardQueue],
) -> None:
    for after in (False, True):
        run = f"run-{after}"
        dying = ShardedQueue([shards[0], Failing(shards[1], "take", after=after), shards[2]])  # type: ignore[list-item]
        actors = Actors(dying, run)
        await actors.start(spec(run, batch_groups=9, max_staleness=1.0))
        await actors.feed(tasks(18, run=run))
        await actors.work()
        with pytest.raises(UnavailableError):
            await actors.take(0, groups=9)
        half = {
            (number, name): len(batch.groups)
            for number, shard in enumerate(shards)
            for name, batch in shard._runs[run].batches.items()
        }
        again = Actors(ShardedQueue(shards), run, epoch=actors.epoch)
        batch = await again.take(0, groups=9)
        assert len(batch.rows) == 18
        assert await again.take(0, groups=9) == batch
        assert await actors.take(0, groups=9) == batch
        for (number, name), groups in half.items():
            assert len(shards[number]._runs[run].batches[name].groups) == groups
        await again.settle(0)
        assert await again.resident() == {"settled": 18, "ready": 18}


class Late:
    """A shard whose answer to one question comes only once it is let through."""

    def __init__(self, shard: ShardQueue, method: str) -> None:
        self._shard, self._method = shard, method
        self.asked, self.through = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._shard, name)
        if name != self._method:
            return found

        async def call(*given: Any, **named: Any) -> Any:
            answer = await found(*given, **named)
            self.asked.set()
            await self.through.wait()
            return answer

        return call


@pytest.mark.parametrize("late", [0, 1])
async def test_ranks_that_ask_for_a_batch_at_once_get_the_same_one(
    shards: list[ShardQueue], late: int
) -> None:
    """One rank hears what shard 0 has, the other what both have by then: their plans differ."""
    two: list[Any] = shards[:2]
    seen: list[Any] = [*two]
    seen[late] = Late(two[late], "groups")
    slow, fast = ShardedQueue(seen), ShardedQueue(two)
    actors, others = Actors(fast), Actors(slow)
    await actors.start(spec(batch_groups=9, max_staleness=1.0))
    others.epoch = actors.epoch
    here, there = ([t for t in tasks(40) if owner(t.task_id, 2) == number] for number in (0, 1))
    await actors.feed([*here[:3]])
    await actors.work()
    one = asyncio.ensure_future(others.take(1, groups=2))
    await seen[late].asked.wait()
    await actors.feed(there[:3])
    await actors.work()
    given = await actors.take(1, groups=2)
    seen[late].through.set()
    assert batch_uids(await one) == batch_uids(given)
    await actors.settle(1)
    await actors.publish(2)
    await actors.commit(2)
    ledger = await fast.ledger("run")
    assert ledger.trained == len(batch_uids(given))
    assert not ledger.resident["taken"], "rows are in a batch that nobody has"
    for router in (slow, fast):
        await router.close()


async def test_two_batches_may_be_asked_for_at_once(shards: list[ShardQueue]) -> None:
    """The second is planned when the first has been taken, and waits where that left too little."""
    router = ShardedQueue(shards[:2])
    actors = Actors(router)
    await actors.start(spec(batch_groups=9, max_staleness=1.0))
    here, there = ([t for t in tasks(40) if owner(t.task_id, 2) == number] for number in (0, 1))
    await actors.feed([*here[:5], *there[:2]])
    await actors.work()
    both = [asyncio.ensure_future(actors.take(step, 4, WAIT_S)) for step in (0, 1)]
    first = await both[0]
    done, _ = await asyncio.wait(both[1:], timeout=0.05)
    assert not done, "three groups are no batch of four"
    await actors.feed(here[5:6])
    await actors.work()
    second = await both[1]
    assert len({*batch_uids(first), *batch_uids(second)}) == 2 * len(batch_uids(first)) == 16
    await router.close()


async def test_a_share_that_is_done_again_is_waited_for(shards: list[ShardQueue]) -> None:
    dying = ShardedQueue([shards[0], Failing(shards[1], "take")])  # type: ignore[list-item]
    actors = Actors(dying)
    await actors.start(spec(batch_groups=9, max_staleness=1.0))
    await actors.feed(tasks(12))
    await actors.work()
    with pytest.raises(UnavailableError):
        await actors.take(0, groups=8)
    assert await dying.redo("run", "reward", ()) > 0
    again = asyncio.ensure_future(actors.take(0, 8, WAIT_S))
    done, _ = await asyncio.wait([again], timeout=0.05)
    assert not done
    async with asyncio.timeout(WAIT_S / 2):  # and nobody else waits with it
        with pytest.raises(WaitTimeoutError):
            await actors.take(1, groups=1)
    await actors.write(await actors.lease("reward"))
    assert len((await again).groups) == 8
    await dying.close()


async def test_after_a_rewind_batches_of_uneven_shares_come_again_as_they_were(
    shards: list[ShardQueue],
) -> None:
    actors = Actors(ShardedQueue(shards))
    await actors.start(spec(batch_groups=5, max_staleness=5.0))
    await actors.feed(tasks(30))
    batches = []
    for step in range(5):
        await actors.work(limit=14)
        batches.append(await actors.take(step, groups=5))
        await actors.settle(step)
        await actors.publish(step + 1)
    for shard in shards[1:]:
        # As if the first trainer to resume had died between two shards.
        await shard.acquire("run", "dying")
    actors = Actors(ShardedQueue(shards))
    actors.epoch = (await actors.queue.acquire("run", "second")).epoch
    await actors.queue.rewind("run", epoch=actors.epoch, step=1)
    for step in range(1, 5):
        again = await actors.take(step, groups=5, name=f"again-{step}")
        assert again.rows == batches[step].rows
        await actors.settle(step, name=f"again-{step}")


async def test_the_cursor_never_runs_ahead_of_a_task_that_is_lost(
    shards: list[ShardQueue],
) -> None:
    for number in range(3):
        for after in (False, True):
            run = f"run-{number}-{after}"
            dying: list[Any] = list(shards)
            dying[number] = Failing(shards[number], "admit_in_turn", after=after)
            actors = Actors(ShardedQueue(dying, turn_s=0.1), run)
            await actors.start(spec(run, batch_groups=20))
            with pytest.raises(UnavailableError):
                await actors.feed(tasks(12, run=run), cursor="twelve")
            reached = (await actors.queue.run_state(run)).cursor == "twelve"
            assert not reached or (await actors.ledger()).admitted == 24
            assert await actors.feed(tasks(12, run=run), cursor="twelve") == 12
            assert (await actors.ledger()).admitted == 24
            assert (await actors.queue.run_state(run)).cursor == "twelve"


@pytest.mark.parametrize(
    "method", ["follow", "publish", "commit", "rewind", "close_feed", "settle"]
)
async def test_a_call_that_reached_some_shards_is_repaired_by_repeating_it(
    shards: list[ShardQueue], method: str
) -> None:
    actors = Actors(ShardedQueue(shards))
    await actors.start(spec(batch_groups=6, max_staleness=1.0))
    await actors.feed(tasks(12))
    await actors.work()
    dying = ShardedQueue([shards[0], shards[1], Failing(shards[2], method)])  # type: ignore[list-item]
    epoch = actors.epoch

    async def run(queue: ShardedQueue) -> None:
        held = (await queue.acquire("run", "second")).epoch
        await queue.take("run", epoch=held, step=0, groups=6, batch_id=f"b{held}", wait_s=0)
        await queue.settle("run", epoch=held, step=0, batch_id=f"b{held}")
        await queue.commit("run", epoch=held, step=0)
        held = (await queue.acquire("run", "third")).epoch
        await queue.rewind("run", epoch=held, step=0)
        await queue.publish("run", type(actors.version)(held, 1))
        await queue.close_feed("run")

    with pytest.raises(UnavailableError):
        await run(dying)
    await ShardedQueue(shards).open_run((await actors.queue.run_state("run")).spec)
    await run(ShardedQueue(shards))
    states = [await shard.run_state("run") for shard in shards]
    assert states[0].epoch > epoch
    assert {(s.epoch, s.published, s.committed_step, s.feed_closed) for s in states} == {
        (states[0].epoch, states[0].published, 0, True)
    }
    assert await actors.resident() == {"ready": 24}


@pytest.mark.parametrize("away", [0, 2])
async def test_the_next_trainer_brings_to_all_shards_what_a_dead_one_sent_to_some(
    shards: list[ShardQueue], away: int
) -> None:
    """Shard 0 may have heard of a version or a checkpoint that another shard has not, or the other way round."""
    actors = Actors(ShardedQueue(shards))
    await actors.start(spec(batch_groups=6, max_staleness=1.0))
    await actors.feed(tasks(12))
    await actors.work()
    await actors.take(0, groups=6)
    await actors.settle(0)
    for method in ("publish", "commit"):
        seen = list(shards)
        name = method if away else f"{method}_and_tell"
        seen[away] = Failing(shards[away], name)  # type: ignore[call-overload]
        dying = Actors(ShardedQueue(seen), epoch=actors.epoch)
        with pytest.raises(UnavailableError):
            await getattr(dying, method)(1)
    following = Actors(ShardedQueue(shards))
    following.epoch = (await following.queue.acquire("run", "next")).epoch
    if not away:  # a trainer whose checkpoint is not noted says so again
        await following.commit(1)
    states = [await shard.run_state("run") for shard in shards]
    assert {state.committed_step for state in states} == {1}
    assert {state.published.step for state in states} == ({1} if away else {0, 1})
    await following.publish(1)
    assert (await following.ledger()).trained == 12
    assert len((await following.take(1, groups=6)).groups) == 6


async def test_whoever_opens_a_run_while_a_trainer_takes_it_over_is_not_fenced(
    shards: list[ShardQueue],
) -> None:
    actors = Actors(ShardedQueue(shards))
    await actors.start()
    # The trainer's epoch has reached the last shard, and what shard 0 said before is on its way to it.
    await shards[2].follow(replace(await shards[0].run_state("run"), epoch=9), "next")
    await ShardedQueue(shards).open_run(spec())
    with pytest.raises(FencedError):
        await ShardedQueue(shards).acquire("run", "late")


# --- credits


async def test_two_feeders_at_once_admit_exactly_as_many_groups_as_there_are_credits(
    shards: list[ShardQueue],
) -> None:
    actors = Actors(ShardedQueue(shards))
    await actors.start(spec(batch_groups=8, max_staleness=1.0))
    feeders = [ShardedQueue(shards), ShardedQueue(shards)]
    most = 0

    async def feed(queue: ShardedQueue, start: int) -> int:
        nonlocal most
        admitted = 0
        while admitted < 40:
            chunk = tasks(5, start=start + admitted)
            try:
                admitted += await queue.admit("run", chunk, cursor="", wait_s=0)
            except WaitTimeoutError:
                return admitted
            most = max(most, open_groups(shards))
        return admitted

    both = await asyncio.gather(feed(feeders[0], 0), feed(feeders[1], 1000))
    assert sum(both) == open_groups(shards) == most == 16


async def test_an_admission_of_a_turn_that_is_over_is_refused(shards: list[ShardQueue]) -> None:
    actors = Actors(ShardedQueue(shards))
    await actors.start()
    await shards[0].capacity("run", turn="old")
    await shards[0].capacity("run", turn="new")
    with pytest.raises(FencedError, match="another feeder"):
        await shards[0].admit_in_turn("run", tasks(1), cursor="", turn="old")
    assert (await actors.ledger()).admitted == 0


async def test_a_turn_waits_for_the_one_before_it(shards: list[ShardQueue]) -> None:
    actors = Actors(ShardedQueue(shards))
    await actors.start()
    await shards[0].capacity("run", turn="mine")
    waiting = asyncio.create_task(shards[0].capacity("run", turn="yours", wait_s=60))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert await shards[0].admit_in_turn("run", tasks(1), cursor="", turn="mine") == 1
    assert (await waiting).open_groups == 1
    assert await shards[0].admit_in_turn("run", [], cursor=None, turn="yours") == 0
    await shards[0].capacity("run", turn="third", wait_s=60)


async def test_the_turn_of_a_feeder_that_died_is_taken_from_it(shards: list[ShardQueue]) -> None:
    actors = Actors(ShardedQueue(shards))
    await actors.start()
    await shards[0].capacity("run", turn="dead")
    await shards[0].capacity("run", turn="mine", wait_s=0.01)
    assert await shards[0].admit_in_turn("run", tasks(1), cursor="", turn="mine") == 1


# --- leases


async def test_what_a_shard_grants_too_late_is_given_back_and_counts_as_no_attempt(
    shards: list[ShardQueue],
) -> None:
    hold, granted = asyncio.Event(), asyncio.Event()

    class Slow(Failing):
        def __getattr__(self, name: str) -> Any:
            found = getattr(self._shard, name)
            if name != "lease" or not self.armed:
                return found

            async def lease(*given: Any, **named: Any) -> Lease:
                self.armed = False
                got: Lease = await found(*given, **named)
                granted.set()
                await hold.wait()
                return got

            return lease

    slow: list[Any] = [Slow(shards[0], "lease"), shards[1]]
    queue = ShardedQueue(slow, lag_s=0.01)
    actors = Actors(queue)
    await actors.start(spec(batch_groups=20, max_attempts=1))
    await actors.feed(tasks(10))
    first = await actors.lease()
    assert granted.is_set()
    assert {owner(row.uid.task, 2) for row in first.rows} == {1}
    hold.set()
    rest = await actors.lease(wait_s=WAIT_S)
    assert {row.delivery for row in rest.rows} == {1}
    assert len(first.rows) + len(rest.rows) == 20
    await queue.close()


async def test_rows_that_come_to_two_shards_at_once_are_both_given_to_who_waits(
    shards: list[ShardQueue],
) -> None:
    """No call that may have granted rows is cancelled: a client would lose their lease until it expires."""
    cancelled: list[str] = []

    class Watched(Failing):
        def __getattr__(self, name: str) -> Any:
            found = getattr(self._shard, name)
            if name != "lease":
                return found

            async def lease(*given: Any, **named: Any) -> Lease:
                try:
                    return await found(*given, **named)
                except asyncio.CancelledError:
                    cancelled.append(name)
                    raise

            return lease

    actors = Actors(ShardedQueue([Watched(shard, "lease") for shard in shards]))  # type: ignore[misc]
    await actors.start(spec(batch_groups=200))
    for number in range(10):
        waiting = [asyncio.ensure_future(actors.lease(wait_s=WAIT_S, limit=8)) for _ in range(3)]
        await asyncio.sleep(0)
        await actors.feed(tasks(12, start=12 * number))
        given = sum(len(lease.rows) for lease in await asyncio.gather(*waiting))
        while given < 24:
            given += len((await actors.lease()).rows)
    assert not cancelled
    assert await actors.resident() == {"leased": 240}


async def test_a_lease_that_waits_is_answered_by_whichever_shard_has_rows_first(
    shards: list[ShardQueue],
) -> None:
    actors = Actors(ShardedQueue(shards))
    await actors.start(spec(batch_groups=20))
    for number in range(6):
        waiting = asyncio.ensure_future(actors.lease(wait_s=WAIT_S))
        await asyncio.sleep(0)
        await actors.feed(tasks(1, start=number))
        assert len((await waiting).rows) == 2
    assert not any(shard._waits.of("run") for shard in shards)
    assert await actors.resident() == {"leased": 12}


# --- a shard restarts, a shard is added


async def test_a_shard_that_restarts_goes_on_where_it_was(tmp_path: Path) -> None:
    opened = [await ShardQueue.open(DiskStore(tmp_path / str(n), reserve_bytes=0)) for n in (0, 1)]
    actors = Actors(ShardedQueue(opened))
    await actors.start(spec(batch_groups=6, max_staleness=1.0))
    assert await actors.feed(tasks(20), cursor="c") == 12
    await actors.work()
    batch = await actors.take(0, groups=6)
    await opened[1].close()
    opened[1] = await ShardQueue.open(DiskStore(tmp_path / "1", reserve_bytes=0))
    actors.queue = ShardedQueue(opened)
    assert await actors.take(0, groups=6) == batch
    with pytest.raises(WaitTimeoutError, match="12 of 12"):
        await actors.feed(tasks(8, start=12))
    await actors.settle(0)
    await actors.publish(1)
    assert await actors.feed(tasks(20)) == 18
    await actors.ledger()
    for shard in opened:
        await shard.close()


@pytest.mark.parametrize("before", [1, 2])
async def test_a_shard_that_is_added_takes_new_groups_and_old_ones_are_found_where_they_are(
    shards: list[ShardQueue], before: int
) -> None:
    """Also when the run began on one queue that nobody called a shard."""
    first: Any = shards[0] if before == 1 else ShardedQueue(shards[:before])
    actors = Actors(first)
    given: RunSpec = spec(batch_groups=12, max_staleness=1.0)
    await actors.start(given)
    await actors.feed(tasks(12), cursor="twelve")
    held = await actors.lease(limit=8)

    actors.queue = ShardedQueue(shards)
    await actors.queue.open_run(given)
    assert await actors.feed(tasks(30), cursor="thirty") == 24
    assert (await actors.ledger()).admitted == 48
    states = [await shard.run_state("run") for shard in shards]
    assert len({(state.epoch, state.published) for state in states}) == 1
    assert (await shards[-1].ledger("run")).admitted > 0
    await actors.write(held)
    await actors.work()
    batch = await actors.take(0, groups=24)
    assert sorted({row.group for row in batch.rows}) == sorted(f"t{n}" for n in range(24))
    rows = await actors.queue.fetch("run", [row.uid for row in batch.rows], ["response_text"])
    texts = [row["response_text"].tobytes().decode() for row in rows]
    assert texts == [f"answer to {row.uid}" for row in batch.rows]
    await actors.settle(0)
    assert await actors.resident() == {"settled": 48}
    with pytest.raises(UserError, match="is on 3 queue shards"):
        await ShardedQueue(shards[:2]).open_run(given)
    assert batch_uids(await actors.take(0, groups=24)) == batch_uids(batch)
