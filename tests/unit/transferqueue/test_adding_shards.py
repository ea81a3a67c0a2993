"""A shard is added while runs go on: what every router sees of it, what a kill leaves, whom it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from meshrl.contract.errors import (
    ConflictError,
    EndOfDataError,
    NotFoundError,
    UnavailableError,
    UserError,
    WaitTimeoutError,
)
from meshrl.contract.held_rows import HeldLeases
from meshrl.contract.types import Version
from meshrl.testing.contract.queue_actors import WAIT_S, Actors, batch_uids, spec, tasks, uids
from meshrl.transferqueue.sharding import ShardedQueue, ShardQueue, run_shards, shard_list
from meshrl.transferqueue.sharding.run_shards import RunShards, owner
from meshrl.transferqueue.stores.memory import MemoryStore

Connect = Callable[..., ShardedQueue]


class Cut:
    """A shard whose answers to one method are lost from the `nth` call on: whoever asks dies of it."""

    def __init__(self, shard: ShardQueue, method: str, nth: int, *, after: bool) -> None:
        self._shard, self._method, self._left, self._after = shard, method, nth, after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._shard, name)
        if name != self._method:
            return found

        async def call(*given: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left > 0:
                return await found(*given, **named)
            if self._after and self._left == 0:
                await found(*given, **named)
            raise UnavailableError("killed")

        return call


@pytest.fixture
async def shards() -> AsyncIterator[list[ShardQueue]]:
    opened = [await ShardQueue.open(MemoryStore()) for _ in range(4)]
    yield opened
    for shard in opened:
        await shard.close()


@pytest.fixture
async def connect(shards: list[ShardQueue]) -> AsyncIterator[Connect]:
    """A router that has the addresses of the first two; `cut` replaces shards by their number."""
    async with AsyncExitStack() as stack:

        def made(count: int = 2, **cut: Cut) -> ShardedQueue:
            seen: list[Any] = [
                cut.get(f"at_{number}", shard) for number, shard in enumerate(shards)
            ]

            async def dial(address: str) -> Any:
                if address == "nobody":
                    raise UnavailableError("queue at nobody cannot be reached")
                return seen[int(address)]

            router = ShardedQueue(seen[:count], [str(number) for number in range(count)], dial)
            stack.push_async_callback(router.close)
            return router

        yield made


async def begun(queue: ShardedQueue, groups: int = 12) -> Actors:
    """A run with groups on two shards, half of its rows out."""
    actors = Actors(queue)
    await actors.start(spec(batch_groups=groups, max_staleness=3.0))
    assert await actors.feed(tasks(groups), cursor="first") == groups
    return actors


async def deaf(queue: ShardedQueue) -> ShardedQueue:
    """A router that knows the run and hears of no roll: only what shard 0 answers can tell it of a shard."""
    await queue.ledger("run")
    queue._directory.watcher.has_news = lambda: False  # type: ignore[method-assign]
    return queue


def admitted(shards: list[ShardQueue]) -> list[int]:
    """Groups of the run on each shard."""
    return [len(shard._runs["run"].groups) if "run" in shard._runs else 0 for shard in shards]


# --- everybody hears of it


async def test_old_groups_stay_new_ones_go_to_all_and_each_is_trained_once(
    shards: list[ShardQueue], connect: Connect
) -> None:
    actors = await begun(connect())
    before = admitted(shards)
    held = await actors.lease(limit=8)
    assert await connect().add_shard("2") == 2
    assert await actors.feed(tasks(36), cursor="second") == 36
    after = admitted(shards)
    assert after[:2] > before[:2] and after[2] > 0
    assert [owner(f"t{number}", 3) for number in range(12, 36)].count(2) == after[2]
    await actors.write(held)
    await actors.work()
    taken: list[str] = []
    for step in range(3):
        taken += batch_uids(await actors.take(step, groups=12))
        await actors.settle(step)
        await actors.publish(step + 1)
        await actors.commit(step + 1)
    assert sorted(taken) == sorted(f"t{n}.{i}.0" for n in range(36) for i in range(2))
    assert (await actors.ledger()).trained == 72


async def test_whoever_waits_for_rows_or_for_a_batch_is_woken_by_those_of_the_new_shard(
    shards: list[ShardQueue], connect: Connect
) -> None:
    actors = Actors(connect())
    given = spec(batch_groups=24, max_staleness=0.0)
    await actors.start(given)
    worker = Actors(connect(), version=actors.version)
    judge = Actors(connect())
    taking = asyncio.ensure_future(actors.take(0, groups=24, wait_s=10 * WAIT_S))
    judging = asyncio.ensure_future(judge.lease("reward", wait_s=10 * WAIT_S))
    while len(shards[1]._waits.of("run")) < 2:  # noqa: ASYNC110 - a call that begins to wait gives no signal
        await asyncio.sleep(0)
    await connect().add_shard("2")
    feeder = Actors(connect(), version=actors.version)
    assert await feeder.feed(tasks(24)) == 24
    only = [number for number in range(24) if owner(f"t{number}", 3) == 2]
    lease = await worker.lease()
    on_third = [row for row in lease.rows if int(row.uid.task[1:]) in only]
    assert on_third
    await worker.write(lease, rows=on_third)
    first = await asyncio.wait_for(judging, WAIT_S)
    await judge.write(first)
    rest = [row for row in lease.rows if row not in on_third]
    await worker.write(lease, rows=rest)
    judged = len(first.rows)
    while judged < 48:
        more = await judge.lease("reward", wait_s=WAIT_S)
        await judge.write(more)
        judged += len(more.rows)
    assert len((await asyncio.wait_for(taking, WAIT_S)).groups) == 24


async def test_a_rank_without_the_address_of_the_new_shard_fetches_rows_of_it(
    connect: Connect,
) -> None:
    actors = await begun(connect())
    rank = connect()
    assert (await rank.ledger("run")).admitted == 24
    await connect().add_shard("2")
    await actors.feed(tasks(24, start=12))
    await actors.work()
    batch = await actors.take(0, groups=36)
    rows = await rank.fetch("run", [row.uid for row in batch.rows], ["response_text"])
    texts = [row["response_text"].tobytes().decode() for row in rows]
    assert texts == [f"answer to {row.uid}" for row in batch.rows]
    with pytest.raises(NotFoundError):
        await rank.fetch("run", [replace(batch.rows[0].uid, task="nobody")], ["response_text"])


async def test_a_feeder_that_knows_of_no_new_shard_admits_no_task_a_second_time(
    shards: list[ShardQueue], connect: Connect
) -> None:
    actors = await begun(connect(), groups=40)
    late = await deaf(connect())
    await connect().add_shard("2")
    more = tasks(40, start=40)
    assert await actors.feed(more) == 40
    assert await late.admit("run", more, cursor="", wait_s=0) == 40
    assert sum(admitted(shards)) == 80
    # Credits are counted over all shards as well.
    assert await late.admit("run", tasks(100, start=80), cursor="", wait_s=0) == 80
    with pytest.raises(WaitTimeoutError, match=r"160 of 160 groups .* on 3 shards"):
        await late.admit("run", tasks(1, start=200), cursor="", wait_s=0)


@pytest.mark.parametrize("call", ["publish", "commit", "close_feed", "acquire"])
async def test_what_a_router_tells_that_knows_of_no_new_shard_reaches_it(
    shards: list[ShardQueue], connect: Connect, call: str
) -> None:
    actors = await begun(connect())
    stale = await deaf(connect())
    await connect().add_shard("2")
    match call:
        case "publish":
            await stale.publish("run", Version(actors.epoch, 7))
        case "commit":
            await stale.commit("run", epoch=actors.epoch, step=5)
        case "close_feed":
            await stale.close_feed("run")
        case _:
            await stale.acquire("run", "second")
    states = [await shard.run_state("run") for shard in shards[:3]]
    progress = {(s.epoch, s.published, s.committed_step, s.feed_closed) for s in states}
    assert len(progress) == 1
    assert progress != {(actors.epoch, actors.version, 0, False)}


async def test_nobody_comes_to_the_end_of_the_data_without_the_new_shard(
    shards: list[ShardQueue], connect: Connect
) -> None:
    actors = Actors(connect())
    await actors.start(spec(batch_groups=12, max_staleness=3.0))
    stale = Actors(await deaf(connect()), version=actors.version)
    trainer = Actors(await deaf(connect()), epoch=actors.epoch)
    await connect().add_shard("2")
    on_third = [task for task in tasks(60) if owner(task.task_id, 3) == 2][:5]
    assert await actors.feed(on_third) == 5
    await actors.queue.close_feed("run")
    lease = await stale.lease()
    assert len(uids(lease)) == 10
    await stale.write(lease)
    await stale.write(await stale.lease("reward"))
    assert len((await trainer.take(0, groups=12)).groups) == 5
    await trainer.settle(0)
    await trainer.commit(1)
    with pytest.raises(EndOfDataError):
        await trainer.take(1, groups=12)
    with pytest.raises(EndOfDataError):
        await stale.lease()


async def test_leases_of_an_added_shard_are_renewed_by_the_same_renewer(
    shards: list[ShardQueue], connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors = await begun(connect())
    renewed: asyncio.Queue[HeldLeases] = asyncio.Queue()

    async def renew_held(held_leases: HeldLeases) -> None:
        await renewed.put(held_leases)
        await asyncio.Event().wait()

    monkeypatch.setattr(shards[2], "renew_held", renew_held)
    held_leases = HeldLeases("rollout", "w", lambda lost: None)
    keeping = asyncio.create_task(actors.queue.renew_held(held_leases))
    await connect().add_shard("2")
    await actors.feed(tasks(24, start=12))
    lease = await actors.lease()
    held_leases.add(lease.rows, lease.ttl_s)
    part = await asyncio.wait_for(renewed.get(), WAIT_S)
    assert set(part.by_run()["run"]) == {row.uid for row in lease.rows}
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


# --- somebody is killed


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("shard", "method", "nth"),
    [
        (0, "write_note", 1),  # the shard list as it is
        (1, "write_note", 1),  # who shard 1 is
        (2, "write_note", 1),  # who the new shard is
        (0, "write_note", 2),  # one more
        (0, "write_note", 3),  # the run is on it
        (2, "open_run", 1),
        (2, "follow", 1),
    ],
)
async def test_a_kill_at_any_write_leaves_a_queue_that_works_and_can_be_added_to(
    shards: list[ShardQueue], connect: Connect, shard: int, method: str, nth: int, after: bool
) -> None:
    actors = await begun(connect())
    cut = {f"at_{shard}": Cut(shards[shard], method, nth, after=after)}
    with pytest.raises(UnavailableError):
        await connect(**cut).add_shard("2")
    done = "2" in str(await shard_list.read(shards[0])).split()[3:]
    # Everybody else goes on, with the shard if it is one by then.
    assert await actors.feed(tasks(12, start=12)) == 12
    assert (admitted(shards)[2] > 0) is done
    again = connect()
    if done:
        with pytest.raises(UserError, match="the queue at 2 is shard 2 of this one already"):
            await again.add_shard("2")
    else:
        assert await again.add_shard("2") == 2
    assert await actors.feed(tasks(12, start=24)) == 12
    assert admitted(shards)[2] > 0
    await actors.work()
    batch = await actors.take(0, groups=36)
    assert sorted({row.group for row in batch.rows}) == sorted(f"t{n}" for n in range(36))
    assert (await actors.ledger()).resident["taken"] == 72
    assert await run_shards.recorded(shards[0], "run") == RunShards(2, 3)


async def test_whoever_starts_after_all_were_killed_finds_every_shard_and_every_group(
    shards: list[ShardQueue], connect: Connect
) -> None:
    actors = await begun(connect())
    await connect().add_shard("2")
    await connect().add_shard("3")
    await actors.feed(tasks(24, start=12))
    fresh = Actors(connect(), version=actors.version, epoch=actors.epoch)
    assert (await fresh.ledger()).admitted == 72
    await fresh.work()
    assert len((await fresh.take(0, groups=36)).groups) == 36
    named = connect(4)
    assert (await named.ledger("run")).admitted == 72


async def test_shards_that_are_named_in_another_order_are_not_worked_with(
    shards: list[ShardQueue], connect: Connect
) -> None:
    await begun(connect())
    await connect().add_shard("2")
    for order, said in (((0, 2), "shard 2 of a queue is named as shard 1"), ((1, 0), "shard 1")):
        mixed = ShardedQueue([shards[n] for n in order], [str(n) for n in order])
        with pytest.raises(UserError, match=said):
            await mixed.ledger("run")
        await mixed.close()


async def test_shards_that_have_other_addresses_by_now_are_those_that_are_named(
    shards: list[ShardQueue], connect: Connect
) -> None:
    await begun(connect())
    await connect().add_shard("2")
    moved = ShardedQueue(shards[:3], ["x", "y", "z"], lambda address: asyncio.sleep(0, shards[3]))
    assert (await moved.ledger("run")).admitted == 24
    assert await moved.add_shard("new") == 3
    assert (await shard_list.read(shards[0])).addresses == ("x", "y", "z", "new")  # type: ignore[union-attr]
    await moved.close()


async def test_two_shards_that_are_added_at_once_are_both_added(
    shards: list[ShardQueue], connect: Connect
) -> None:
    actors = await begun(connect())

    async def add(address: str) -> int:
        router = connect()
        while True:
            try:
                return await router.add_shard(address)
            except ConflictError:
                await asyncio.sleep(0)

    assert sorted(await asyncio.gather(add("2"), add("3"))) == [2, 3]
    assert await actors.feed(tasks(36, start=12)) == 36
    assert all(admitted(shards))


# --- whom it refuses


async def test_what_cannot_become_a_shard_is_refused_in_one_line(
    shards: list[ShardQueue], connect: Connect
) -> None:
    await begun(connect())
    with pytest.raises(UserError, match="the queue at 1 is shard 1 of this one already"):
        await connect().add_shard("1")
    with pytest.raises(UnavailableError, match="nobody cannot be reached"):
        await connect().add_shard("nobody")
    await shards[3].open_run(spec("other"))
    with pytest.raises(
        UserError, match=r"at 3 holds runs \(other\): a shard that is added must be"
    ):
        await connect().add_shard("3")


async def test_a_shard_under_another_address_is_known_for_what_it_is(
    shards: list[ShardQueue], connect: Connect
) -> None:
    await connect().add_shard("2")
    for alias, number in (("01", 1), ("02", 2)):
        with pytest.raises(UserError, match=f"at {alias} is shard {number} of this one already"):
            await connect().add_shard(alias)


async def test_an_address_of_the_shard_list_where_another_queue_is_by_now_is_not_used(
    shards: list[ShardQueue], connect: Connect
) -> None:
    await begun(connect())
    await connect().add_shard("2")
    shards[2], shards[3] = shards[3], shards[2]
    with pytest.raises(
        UserError, match="at 2 is not shard 2 of this one: give the addresses of all 3"
    ):
        await connect().ledger("run")
