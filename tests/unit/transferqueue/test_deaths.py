"""Groups that kill trainers are found: a batch that was in hand at two deaths is taken in ever smaller parts.

A group is given up if two trainers say that a step of it alone failed, or if several die with it alone in hand and
work in between: any process may be killed, any number of times.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshrl.contract.errors import EndOfDataError, WaitTimeoutError
from meshrl.contract.rows import FAILED, UNTRAINABLE
from meshrl.contract.types import Batch, GroupPolicy
from meshrl.testing.contract.queue_actors import Actors, spec, tasks
from meshrl.transferqueue.model.batches import ALONE_LAST
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.disk import DiskStore
from meshrl.transferqueue.stores.memory import MemoryStore


async def told(actors: Actors, batch: Batch) -> None:
    """The trainer says, before it ends, that the step of `batch` failed; its call is repeated."""
    uids = [row.uid for row in batch.rows]
    for _ in range(2):
        await actors.queue.filter("run", epoch=actors.epoch, uids=uids, reason=f"{FAILED}: split")


class Trainers:
    """Trainers of one run, one after the other, each of which dies of the groups of some tasks."""

    def __init__(
        self, actors: Actors, groups: int, deadly: set[str], *, silent: bool = False
    ) -> None:
        self.actors = actors
        self._silent = silent
        self.deaths = 0
        self.sizes: list[int] = []
        """Groups of each take."""
        self.idle_deaths: list[int] = []
        """Deaths of trainers that had made no step, by the groups in hand."""
        self._groups = groups
        self._deadly = deadly
        self._step = 0

    async def train(self, save_freq: int = 1) -> None:
        """Train until the closed feed is empty."""
        while True:
            epoch = self.actors.epoch = (await self.actors.queue.acquire("run", "t")).epoch
            self._step -= self._step % save_freq
            await self.actors.queue.rewind("run", epoch=epoch, step=self._step)
            await self.actors.ledger()
            began = self._step
            try:
                while await self._survives(save_freq):
                    pass
            except EndOfDataError:
                await self.actors.commit(self._step)
                return
            self.deaths += 1
            if self._step == began:
                self.idle_deaths.append(self.sizes[-1])

    async def _survives(self, save_freq: int) -> bool:
        batch = await self.actors.take(self._step, groups=self._groups)
        self.sizes.append(len(batch.groups))
        if self._deadly & {f"{group.task}.{max(group.attempts)}" for group in batch.groups}:
            if len(batch.groups) == 1 and not self._silent:
                await told(self.actors, batch)
            return False
        await self.actors.settle(self._step)
        self._step += 1
        if self._step % save_freq == 0:
            await self.actors.commit(self._step)
        return True


@pytest.fixture
async def opened() -> AsyncIterator[Actors]:
    """Actors on a queue in memory; the tests of stored deaths below use one on disk."""
    actors = Actors(await TransferQueue.open(MemoryStore()))
    yield actors
    await actors.queue.close()


async def filled(actors: Actors, groups: int, **changes: object) -> None:
    await actors.start(spec(**{"max_staleness": float("inf"), "batch_groups": 32, **changes}))
    await actors.feed(tasks(groups))
    await actors.queue.close_feed("run")
    await actors.work(limit=2 * groups)


@pytest.mark.parametrize("groups", [1, 2, 3, 8])
@pytest.mark.parametrize("deadly", [0, 1, 7])
@pytest.mark.parametrize("save_freq", [1, 3])
async def test_one_group_never_ends_a_run(
    opened: Actors, groups: int, deadly: int, save_freq: int
) -> None:
    actors = opened
    await filled(actors, 10)
    trainers = Trainers(actors, groups, {f"t{deadly}.0"})
    await trainers.train(save_freq)
    ledger = await actors.ledger()
    assert (ledger.admitted, ledger.trained) == (20, 18)
    assert ledger.filtered == {"group_incomplete": 1}
    (letter,) = await actors.queue.dead_letters("run")
    assert letter.uid.task == f"t{deadly}"
    deaths = trainers.deaths
    assert letter.reason == f"{UNTRAINABLE}: twice {FAILED}: split"
    assert deaths <= 2 + groups.bit_length()
    assert sum(2 * size > groups for size in trainers.idle_deaths) <= 2


@pytest.mark.parametrize("groups", [1, 2, 3, 8])
@pytest.mark.parametrize("deadly", [0, 1, 7, 9])
@pytest.mark.parametrize("save_freq", [1, 3])
async def test_a_group_that_kills_without_a_word_is_given_up_and_the_others_are_trained(
    opened: Actors, groups: int, deadly: int, save_freq: int
) -> None:
    """A crash in native code, or the out-of-memory killer, while its step is computed."""
    actors = opened
    await filled(actors, 10)
    trainers = Trainers(actors, groups, {f"t{deadly}.0"}, silent=True)
    async with asyncio.timeout(60):
        await trainers.train(save_freq)
    ledger = await actors.ledger()
    assert (ledger.admitted, ledger.trained) == (20, 18)
    (letter,) = await actors.queue.dead_letters("run")
    assert letter.uid.task == f"t{deadly}" and letter.reason.startswith(UNTRAINABLE)
    assert trainers.deaths <= 2 + groups.bit_length() + ALONE_LAST


async def test_several_groups_that_kill_without_a_word_are_all_found(opened: Actors) -> None:
    actors = opened
    await filled(actors, 12)
    deadly = {"t0.0", "t3.0", "t9.0", "t10.0"}
    trainers = Trainers(actors, 4, deadly, silent=True)
    async with asyncio.timeout(60):
        await trainers.train()
    assert (await actors.ledger()).trained == 16
    letters = await actors.queue.dead_letters("run")
    assert {f"{each.uid.task}.0" for each in letters} == deadly


@pytest.mark.parametrize("told", [False, True])
async def test_a_task_that_kills_is_found_where_each_step_makes_its_rows_too_old(
    told: bool,
) -> None:
    """On-policy: what is left of a batch that was taken apart is sampled again, and kills again."""
    actors = Actors(await TransferQueue.open(MemoryStore()))
    await actors.start(spec(max_staleness=0.0, batch_groups=4, max_attempts=20))
    deadly, step, deaths = "t2", 0, 0
    await actors.feed(tasks(4))
    while not await actors.queue.dead_letters("run"):
        for _ in range(2):  # what was sampled, and what is sampled again
            with contextlib.suppress(WaitTimeoutError):
                await actors.work()
            with contextlib.suppress(WaitTimeoutError):
                batch = await actors.take(step, groups=4)
                break
        if deadly in {group.task for group in batch.groups}:
            deaths += 1
            assert deaths < 20
            if told and len(batch.groups) == 1:
                uids = [row.uid for row in batch.rows]
                await actors.queue.filter(
                    "run", epoch=actors.epoch, uids=uids, reason=f"{FAILED}: split"
                )
            actors.epoch = (await actors.queue.acquire("run", "t")).epoch
            await actors.queue.rewind("run", epoch=actors.epoch, step=step)
        else:
            await actors.settle(step)
            step += 1
            await actors.commit(step)
        await actors.publish(step)
        with contextlib.suppress(WaitTimeoutError):
            await actors.feed(tasks(4, start=4 * (step + 1)))
    assert {letter.uid.task for letter in await actors.queue.dead_letters("run")} == {deadly}
    await actors.queue.close()


async def test_several_groups_are_found_one_after_the_other(opened: Actors) -> None:
    actors = opened
    await filled(actors, 12)
    deadly = {"t0.0", "t3.0", "t9.0", "t10.0"}
    trainers = Trainers(actors, 4, deadly)
    await trainers.train()
    ledger = await actors.ledger()
    assert ledger.trained == 16
    letters = await actors.queue.dead_letters("run")
    assert {f"{each.uid.task}.0" for each in letters} == deadly
    # A replay is another attempt, and no trainer has died of that.
    assert await actors.queue.replay("run", [each.uid for each in letters]) == 4


async def test_where_siblings_are_replaced_the_whole_group_is_sampled_again(
    opened: Actors,
) -> None:
    actors = opened
    await filled(actors, 2, group_policy=GroupPolicy.REPLACE_SIBLING)
    for _ in range(2):
        batch = await actors.take(0, groups=1)
        await told(actors, batch)
        actors.epoch = (await actors.queue.acquire("run", "t")).epoch
    assert batch.groups[0].task == "t0"
    assert await actors.resident() == {"queued": 2, "ready": 2}
    await actors.queue.rewind("run", epoch=actors.epoch, step=0)
    await actors.publish(0)
    await actors.work()
    taken = await actors.take(0, groups=2)
    assert sorted((group.task, group.attempts) for group in taken.groups) == [
        ("t0", (1, 1)),
        ("t1", (0, 0)),
    ]
    assert len(await actors.queue.dead_letters("run")) == 2


@pytest.mark.parametrize("groups", [1, 2, 8])
async def test_kills_without_a_word_cost_no_row(opened: Actors, groups: int) -> None:
    """`kill -9`, a machine that is gone, the kernel's out-of-memory killer: nothing of that is in the rows."""
    actors = opened
    await filled(actors, 8)
    for _ in range(20):
        await actors.take(0, groups=groups)
        actors.epoch = (await actors.queue.acquire("run", "t")).epoch
        await actors.queue.rewind("run", epoch=actors.epoch, step=0)
    assert not await actors.queue.dead_letters("run")
    trainers = Trainers(actors, groups, set())
    await trainers.train()
    assert (await actors.ledger()).trained == 16


async def test_a_failure_is_forgotten_with_the_next_step_that_is_made(opened: Actors) -> None:
    actors = opened
    await filled(actors, 1)
    for _ in range(3):
        await told(actors, await actors.take(0, groups=1))
        actors.epoch = (await actors.queue.acquire("run", "t")).epoch
        await actors.take(0, groups=1)
        await actors.settle(0)
        actors.epoch = (await actors.queue.acquire("run", "t")).epoch
        await actors.queue.rewind("run", epoch=actors.epoch, step=0)
    assert not await actors.queue.dead_letters("run")


async def test_a_batch_that_a_trainer_settles_is_suspected_no_more(opened: Actors) -> None:
    actors = opened
    await filled(actors, 4)

    async def next_trainer() -> Batch:
        actors.epoch = (await actors.queue.acquire("run", "t")).epoch
        await actors.queue.rewind("run", epoch=actors.epoch, step=0)
        return await actors.take(0, groups=4)

    for _ in range(3):
        for _ in range(2):
            assert len((await next_trainer()).groups) == 4
        await actors.settle(0)
    await next_trainer()
    await next_trainer()
    assert len((await next_trainer()).groups) == 2, "two have died with it since it was settled"


async def test_what_no_trainer_was_told_of_is_no_reason_to_die(tmp_path: Path) -> None:
    """Batches that are taken and not answered, as where a queue is killed between the two."""
    actors = Actors(await TransferQueue.open(MemoryStore()))
    await filled(actors, 4)
    for _ in range(4):
        batch = await actors.take(0, groups=4)
        (taken,) = actors.queue._run("run").batches.values()  # type: ignore[attr-defined]
        taken.answered = False
        actors.epoch = (await actors.queue.acquire("run", "t")).epoch
    assert len(batch.groups) == 4
    await actors.queue.close()


async def test_deaths_are_counted_through_restarts_of_the_queue(tmp_path: Path) -> None:
    actors = Actors(await TransferQueue.open(DiskStore(tmp_path / "queue")))
    await filled(actors, 4)
    sizes = []
    for _ in range(4):
        batch = await actors.take(0, groups=4)
        sizes.append(len(batch.groups))
        await actors.queue.close()
        actors.queue = await TransferQueue.open(DiskStore(tmp_path / "queue"))
        actors.epoch = (await actors.queue.acquire("run", "t")).epoch
    assert sizes == [4, 4, 2, 2]

    async def fails() -> str:
        batch = await actors.take(0, groups=4)
        (group,) = batch.groups
        await told(actors, batch)
        await actors.queue.close()
        actors.queue = await TransferQueue.open(DiskStore(tmp_path / "queue"))
        actors.epoch = (await actors.queue.acquire("run", "t")).epoch
        return group.task

    failed = [await fails() for _ in range(5)]
    assert sorted(set(failed[:4])) == ["t0", "t1", "t2", "t3"]
    (letter,) = await actors.queue.dead_letters("run")
    assert letter.uid.task == failed[4]
    await actors.queue.close()
