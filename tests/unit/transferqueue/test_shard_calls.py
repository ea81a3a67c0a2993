"""What a router asks of its shards: no more calls than the work needs, since each costs both ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from meshrl.contract.errors import WaitTimeoutError
from meshrl.testing.contract.queue_actors import WAIT_S, Actors, spec, tasks, tokens_of
from meshrl.transferqueue.model import fair_share
from meshrl.transferqueue.sharding import ShardedQueue, ShardQueue
from meshrl.transferqueue.sharding.run_shards import owner
from meshrl.transferqueue.stores.memory import MemoryStore


class Counted:
    """A shard that counts its calls by method."""

    def __init__(self, shard: ShardQueue) -> None:
        self.shard = shard
        self.calls: Counter[str] = Counter()
        self.alarms = 0
        """So often it says that it has rows when it has none."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.shard, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def call(*given: Any, **named: Any) -> Any:
            self.calls[name] += 1
            if name == "until_rows" and self.calls[name] <= self.alarms:
                return None
            return await found(*given, **named)

        return call


class Mesh:
    """Two shards, and actors who reach them through one router."""

    def __init__(self, shards: list[Counted]) -> None:
        self.shards = shards
        self.queue = ShardedQueue(shards)  # type: ignore[arg-type]
        self.actors = Actors(self.queue)

    def new_calls(self) -> list[dict[str, int]]:
        """What each shard was asked since the last look; `note` is one long question of each router."""
        counts = [{name: n for name, n in s.calls.items() if name != "note"} for s in self.shards]
        for shard in self.shards:
            shard.calls.clear()
        return counts


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with AsyncExitStack() as stack:
        shards = []
        for _ in range(2):
            shard = await ShardQueue.open(MemoryStore())
            stack.push_async_callback(shard.close)
            shards.append(Counted(shard))
        made = Mesh(shards)
        stack.push_async_callback(made.queue.close)
        yield made


def on(shard: int, count: int) -> list[Any]:
    """Tasks that live there."""
    return [task for task in tasks(100) if owner(task.task_id, 2) == shard][:count]


async def settled() -> None:
    """Everybody has got as far as they can."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_version_and_a_checkpoint_take_one_call_to_each_shard(mesh: Mesh) -> None:
    await mesh.actors.start()
    mesh.new_calls()
    await mesh.actors.publish(1)
    await mesh.actors.commit(1)
    assert mesh.new_calls() == [
        {"publish_and_tell": 1, "commit_and_tell": 1},
        {"publish": 1, "commit": 1},
    ]


async def test_calls_that_begin_together_learn_of_a_run_once(mesh: Mesh) -> None:
    await mesh.actors.start()
    other = ShardedQueue(mesh.shards)  # type: ignore[arg-type]
    mesh.new_calls()
    calls = (Actors(other).lease(worker=name) for name in "abc")
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(error, WaitTimeoutError) for error in found)
    # The run's state, and the note on its shards.
    assert mesh.new_calls()[0]["run_state"] == 2
    await other.close()


async def test_while_there_is_work_one_shard_serves_a_whole_lease(mesh: Mesh) -> None:
    await mesh.actors.start(spec(batch_groups=60))
    await mesh.actors.feed(tasks(60))
    await mesh.actors.lease(limit=8)
    mesh.new_calls()
    for _ in range(6):
        assert len((await mesh.actors.lease(limit=8, wait_s=WAIT_S)).rows) == 8
    assert mesh.new_calls() == [{"lease": 3}, {"lease": 3}]


async def test_a_shard_that_owes_an_answer_is_not_asked_again(mesh: Mesh) -> None:
    """Another worker was faster three times: the rows that shard 0 reported are gone when they are leased."""
    mesh.shards[0].alarms = 3
    await mesh.actors.start()
    mesh.new_calls()
    waiting = asyncio.ensure_future(mesh.actors.lease(wait_s=WAIT_S))
    await settled()
    assert mesh.new_calls() == [{"until_rows": 4, "lease": 3}, {"until_rows": 1}]
    await mesh.actors.feed(on(1, 1))
    assert len((await waiting).rows) == 2
    assert [shard.get("until_rows") for shard in mesh.new_calls()] == [None, None]


async def test_a_worker_that_has_its_share_waits_without_asking_again(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_share, "WEIGHT", 0.0)  # the speeds below are the last word
    await mesh.actors.start(spec(batch_groups=60))
    await mesh.actors.feed(on(0, 3))
    run = mesh.shards[0].shard._runs["run"]
    for name, tokens in (("fast", 400), ("slow", 1)):
        holder = run.fair_share.holder(name, run.clock())
        holder.finished([tokens], 1.0)
        holder.slots, holder.waiting = 64, 1
    given = await mesh.actors.lease(limit=8, worker="slow")
    assert len(given.rows) == 1
    mesh.new_calls()
    pending = asyncio.ensure_future(mesh.actors.lease(limit=7, worker="slow", wait_s=WAIT_S))
    await settled()
    assert not pending.done()
    assert [shard.get("until_rows") for shard in mesh.new_calls()] == [1, 1]
    await mesh.actors.write(given)
    assert tokens_of(await pending)
