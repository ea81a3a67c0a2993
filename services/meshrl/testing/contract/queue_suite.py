"""Promises of every queue to callers that open a run, feed it and work on it; trainers: queue_batch_suite.py."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshrl.contract.errors import (
    ConflictError,
    FencedError,
    NotFoundError,
    UserError,
    WaitTimeoutError,
)
from meshrl.contract.ports import Queue
from meshrl.contract.types import (
    REWARD_STAGE,
    ROLLOUT_STAGE,
    GroupPolicy,
    Version,
)
from meshrl.testing.contract.queue_actors import WAIT_S, Actors, spec, task, tasks
from meshrl.testing.contract.queue_stage_suite import LeasePromises, WritePromises


class RunPromises:
    async def test_opening_a_run_twice_is_opening_it_once(self, queue: Queue) -> None:
        first = await queue.open_run(spec())
        assert await queue.open_run(spec()) == first
        assert (first.epoch, first.published, first.cursor) == (0, Version(0, 0), "")

    async def test_a_run_with_another_spec_is_a_conflict_that_names_the_field(
        self, queue: Queue
    ) -> None:
        await queue.open_run(spec())
        with pytest.raises(ConflictError, match="max_staleness"):
            await queue.open_run(spec(max_staleness=2.0))

    async def test_a_spec_comes_back_as_it_was_given(self, queue: Queue) -> None:
        wanted = spec(max_staleness=float("inf"), group_policy=GroupPolicy.K_OF_N, group_k=1)
        await queue.open_run(wanted)
        assert (await queue.run_state("run")).spec == wanted

    async def test_the_vocabulary_of_a_run_is_filled_in_by_whoever_knows_it_first(
        self, queue: Queue
    ) -> None:
        await queue.open_run(spec())
        assert (await queue.open_run(spec(vocabulary=9))).spec.vocabulary == 9
        assert (await queue.open_run(spec())).spec.vocabulary == 9
        with pytest.raises(ConflictError, match="vocabulary = 9, not 10"):
            await queue.open_run(spec(vocabulary=10))
        with pytest.raises(UserError, match="vocabulary is -1, want 0 to 2147483648"):
            await queue.open_run(spec(vocabulary=-1))

    async def test_an_unknown_run_is_not_found(self, queue: Queue) -> None:
        with pytest.raises(NotFoundError, match="nowhere"):
            await queue.run_state("nowhere")

    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({"group_size": 0}, "group_size"),
            ({"max_staleness": -1.0}, "max_staleness"),
            ({"group_policy": GroupPolicy.K_OF_N, "group_k": 3}, "group_k"),
            ({"vocabulary": -1}, "vocabulary"),
            ({"stages": (REWARD_STAGE,)}, "response_text"),
            ({"stages": (ROLLOUT_STAGE, ROLLOUT_STAGE)}, "tokens"),
            ({"sampler": "fifi"}, "did you mean 'fifo'"),
        ],
    )
    async def test_a_spec_that_makes_no_sense_is_refused_in_one_line(
        self, queue: Queue, changes: dict[str, Any], problem: str
    ) -> None:
        with pytest.raises(UserError, match=problem):
            await queue.open_run(spec(**changes))

    async def test_each_acquire_is_a_new_epoch_that_fences_the_older(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        assert (await queue.acquire("run", "second")).epoch == 2
        for call in (
            queue.publish("run", Version(1, 1)),
            queue.commit("run", epoch=1, step=0),
            queue.settle("run", epoch=1, step=0, batch_id="b"),
            queue.filter("run", epoch=1, uids=[], reason="r"),
            queue.rewind("run", epoch=1, step=0),
            queue.take("run", epoch=1, step=0, groups=1, batch_id="b", wait_s=0),
        ):
            with pytest.raises(FencedError):
                await call

    async def test_a_take_that_waits_is_fenced_by_an_acquire(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        waiting = asyncio.ensure_future(actors.take(0, wait_s=WAIT_S))
        await asyncio.sleep(0)
        await queue.acquire("run", "second")
        with pytest.raises(FencedError):
            await waiting

    async def test_the_published_version_never_goes_back(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.publish(3)
        await actors.publish(2)
        assert (await queue.run_state("run")).published == Version(1, 3)


class FeedPromises:
    async def test_admission_takes_the_longest_prefix_that_fits(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start(spec(max_staleness=1.0))
        assert await actors.feed(tasks(10), cursor="ten") == 4
        assert (await queue.run_state("run")).cursor == ""
        assert (await actors.ledger()).admitted == 8

    async def test_the_cursor_moves_when_all_tasks_got_in(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        assert await actors.feed(tasks(2), cursor="two") == 2
        assert (await queue.run_state("run")).cursor == "two"

    async def test_the_cursor_moves_without_a_task_also_where_there_is_no_room(
        self, queue: Queue
    ) -> None:
        actors = Actors(queue)
        await actors.start(spec(max_staleness=1.0))
        assert await actors.feed(tasks(10), cursor="ten") == 4
        assert await actors.feed([], cursor="decided") == 0
        assert (await queue.run_state("run")).cursor == "decided"
        assert (await actors.ledger()).admitted == 8

    async def test_admitting_a_task_twice_is_admitting_it_once(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(2))
        assert await actors.feed(tasks(2)) == 2
        assert (await actors.ledger()).admitted == 4

    async def test_a_trained_task_is_never_admitted_again(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(2))
        await actors.work()
        await actors.train(0)
        await actors.commit(1)
        assert await actors.feed(tasks(2)) == 2
        ledger = await actors.ledger()
        assert (ledger.admitted, ledger.trained) == (4, 4)

    async def test_a_feeder_waits_for_capacity_and_gets_an_error_when_there_is_none(
        self, queue: Queue
    ) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(2))
        with pytest.raises(WaitTimeoutError, match="2 of 2 groups"):
            await actors.feed(tasks(1, start=2), wait_s=0.01)

    async def test_on_policy_nothing_of_the_next_batch_gets_in_before_the_next_version(
        self, queue: Queue
    ) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(2))
        await actors.work()
        await actors.take(0)
        await actors.settle(0)
        with pytest.raises(WaitTimeoutError):
            await actors.feed(tasks(2, start=2))
        waiting = asyncio.ensure_future(actors.feed(tasks(2, start=2), wait_s=WAIT_S))
        await asyncio.sleep(0)
        await actors.publish(1)
        assert await waiting == 2

    async def test_an_evaluation_gets_its_credits_back_when_it_settles(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start(spec(gated=False, max_staleness=float("inf"), resident_batches=1))
        await actors.feed(tasks(2))
        await actors.work()
        await actors.take(0)
        with pytest.raises(WaitTimeoutError):
            await actors.feed(tasks(2, start=2))
        await actors.settle(0)
        assert await actors.feed(tasks(2, start=2)) == 2

    async def test_beyond_the_byte_budget_only_the_batch_being_filled_gets_in(
        self, queue: Queue
    ) -> None:
        actors = Actors(queue)
        await actors.start(spec(max_staleness=9.0, resident_bytes=1))
        assert await actors.feed(tasks(10)) == 2

    async def test_a_closed_feed_takes_no_unknown_task(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(1))
        await queue.close_feed("run")
        assert await actors.feed(tasks(1)) == 1
        with pytest.raises(ConflictError, match="closed"):
            await actors.feed(tasks(1, start=1))

    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({"prompt_ids": np.zeros(2, np.int64)}, "prompt_ids"),
            ({"group_size": 0}, "group of 0"),
            ({"task_id": ""}, "id"),
            ({"run": "other"}, "belongs to run other"),
        ],
    )
    async def test_a_task_that_cannot_be_answered_is_refused_with_its_name(
        self, queue: Queue, changes: dict[str, object], problem: str
    ) -> None:
        actors = Actors(queue)
        await actors.start()
        with pytest.raises(UserError, match=problem):
            await actors.feed([task("good"), replace(task("bad"), **changes)])  # type: ignore[arg-type]
        assert (await actors.ledger()).admitted == 0


class QueueSuite(RunPromises, FeedPromises, LeasePromises, WritePromises):
    """Subclasses give a `queue` fixture."""
