"""Promises of every queue to trainers: batches, the ledger, dead letters, and why something waits."""

from __future__ import annotations

import asyncio

import pytest

from meshrl.contract.errors import (
    ConflictError,
    EndOfDataError,
    NotFoundError,
    WaitTimeoutError,
)
from meshrl.contract.ports import Queue
from meshrl.contract.types import GroupPolicy, Outcome, StalePolicy, Uid, Version
from meshrl.testing.contract.queue_actors import (
    WAIT_S,
    Actors,
    batch_uids,
    spec,
    task,
    tasks,
    uids,
    waiting_entries,
)


class TakePromises:
    async def test_a_batch_is_complete_groups_in_order_of_admission(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(2))
        lease = await actors.lease()
        for row in reversed(lease.rows):
            await actors.write(lease, rows=[row])
        await actors.write(await actors.lease("reward"))
        batch = await actors.take(0)
        assert batch_uids(batch) == ["t0.0.0", "t0.1.0", "t1.0.0", "t1.1.0"]
        assert {(row.group_size, row.num_tokens, row.oldest) for row in batch.rows} == {
            (2, 6, Version(1, 0))
        }
        assert await actors.resident() == {"taken": 4}

    async def test_a_group_is_never_taken_in_part(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(2))
        await actors.work(limit=3)
        with pytest.raises(WaitTimeoutError, match=r"1 (are|ready)"):
            await actors.take(0, groups=2)
        assert batch_uids(await actors.take(0, groups=1)) == ["t0.0.0", "t0.1.0"]

    async def test_a_waiting_take_is_answered_by_the_last_column(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        waiting = asyncio.ensure_future(actors.take(0, wait_s=WAIT_S))
        await actors.feed(tasks(2))
        await actors.work()
        assert len((await waiting).rows) == 4

    async def test_taking_twice_is_taking_once(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(2))
        await actors.work()
        batch = await actors.take(0)
        assert await actors.take(0) == batch
        await actors.settle(0)
        assert await actors.take(0) == batch
        with pytest.raises(ConflictError):
            await actors.take(1, name="b0")

    async def test_a_closed_feed_gives_the_rest_and_then_the_end(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(1))
        await queue.close_feed("run")
        with pytest.raises(WaitTimeoutError):
            await actors.take(0, name="early")
        await actors.work()
        assert len((await actors.take(0)).rows) == 2
        with pytest.raises(EndOfDataError):
            await actors.take(1)

    async def test_rows_too_old_are_sampled_anew_as_the_next_attempt(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start(spec(max_staleness=1.0))
        await actors.feed(tasks(2))
        await actors.work()
        await actors.publish(2)
        with pytest.raises(WaitTimeoutError):
            await actors.take(2)
        ledger = await actors.ledger()
        assert (ledger.admitted, ledger.stale) == (8, {"reissued": 4})
        await actors.work()
        again = batch_uids(await actors.take(2))
        assert again == ["t0.0.1", "t0.1.1", "t1.0.1", "t1.1.1"]

    async def test_a_prompt_that_is_too_old_at_each_attempt_leaves_in_the_end(
        self, queue: Queue
    ) -> None:
        actors = Actors(queue)
        await actors.start(spec(max_staleness=1.0, max_attempts=2))
        await actors.feed(tasks(2))
        for attempt in range(3):
            await actors.work()
            step = 2 * (attempt + 1)
            await actors.publish(step)
            with pytest.raises(WaitTimeoutError):
                await actors.take(step)
        ledger = await actors.ledger()
        assert ledger.stale == {"reissued": 8, "stale at each attempt": 4}
        assert ledger.balanced
        assert await actors.resident() == {}

    async def test_rows_exactly_as_old_as_allowed_are_taken(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start(spec(max_staleness=2.0))
        await actors.feed(tasks(2))
        await actors.work()
        await actors.publish(2)
        assert len((await actors.take(2)).rows) == 4

    async def test_rows_too_old_are_dropped_where_the_run_says_so(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start(spec(stale_policy=StalePolicy.DROP))
        await actors.feed(tasks(2))
        await actors.work()
        await actors.publish(1)
        with pytest.raises(WaitTimeoutError):
            await actors.take(1)
        ledger = await actors.ledger()
        assert (ledger.stale, await actors.resident()) == ({"dropped": 4}, {})
        assert await actors.feed(tasks(2, start=2)) == 2

    async def test_filtered_rows_leave_with_their_reason_and_give_credit_back(
        self, queue: Queue
    ) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(2))
        await actors.work()
        batch = await actors.take(0)
        easy = [row.uid for row in batch.rows if row.group == "t0"]
        for _ in range(2):
            await queue.filter("run", epoch=actors.epoch, uids=easy, reason="zero variance")
        ledger = await actors.ledger()
        assert ledger.filtered == {"zero variance": 2}
        assert await actors.feed(tasks(2, start=2)) == 1
        with pytest.raises(NotFoundError):
            await queue.filter("run", epoch=actors.epoch, uids=[Uid("run", "never", 0)], reason="r")

    async def test_only_taken_rows_are_filtered(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(1))
        with pytest.raises(ConflictError, match="queued"):
            await queue.filter("run", epoch=actors.epoch, uids=[Uid("run", "t0", 0)], reason="r")


class SettlePromises:
    async def test_a_row_is_trained_once_its_step_is_committed(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(2))
        await actors.work()
        batch = await actors.take(0)
        for _ in range(2):
            await actors.settle(0)
        assert await actors.resident() == {"settled": 4}
        await actors.commit(0)
        assert (await actors.ledger()).trained == 0
        for _ in range(2):
            await actors.commit(1)
        ledger = await actors.ledger()
        assert (ledger.trained, await actors.resident()) == (4, {})
        with pytest.raises(NotFoundError):
            await queue.fetch_rows("run", [batch.rows[0].uid], ["tokens"])
        await actors.settle(0)
        assert (await queue.run_state("run")).committed_step == 1

    async def test_an_unknown_batch_and_another_step_are_refused(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(2))
        await actors.work()
        await actors.take(0)
        with pytest.raises(NotFoundError):
            await actors.settle(0, name="nobody's")
        with pytest.raises(ConflictError):
            await actors.settle(1, name="b0")

    async def test_what_an_older_epoch_took_and_did_not_settle_is_ready_again(
        self, queue: Queue
    ) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(2))
        await actors.work()
        batch = await actors.take(0)
        actors.epoch = (await queue.acquire("run", "second")).epoch
        assert await actors.resident() == {"ready": 4}
        assert batch_uids(await actors.take(0)) == batch_uids(batch)

    async def test_a_rewind_brings_back_the_same_batches_in_the_same_order(
        self, queue: Queue
    ) -> None:
        actors = Actors(queue)
        await actors.start(spec(max_staleness=3.0, batch_groups=2))
        await actors.feed(tasks(6))
        # t0 is late: the first batch is t1 and t2, which admission order alone would not give again.
        late = await actors.lease(limit=2)
        await actors.work(limit=4)
        first = await actors.train(0)
        await actors.write(late)
        await actors.work()
        second = await actors.train(1)
        await actors.take(2)
        await actors.commit(0)
        assert batch_uids(first)[::2] == ["t1.0.0", "t2.0.0"]

        actors.epoch = (await queue.acquire("run", "second")).epoch
        assert await queue.rewind("run", epoch=actors.epoch, step=0) == 8
        assert (await queue.run_state("run")).published == Version(2, 0)
        assert await actors.resident() == {"ready": 12}
        assert (await actors.train(0)).rows == first.rows
        assert (await actors.train(1)).rows == second.rows

    async def test_a_rewind_leaves_earlier_steps_settled(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start(spec(max_staleness=3.0))
        await actors.feed(tasks(4))
        await actors.work()
        await actors.train(0)
        await actors.train(1)
        actors.epoch = (await queue.acquire("run", "second")).epoch
        assert await queue.rewind("run", epoch=actors.epoch, step=1) == 4
        assert await actors.resident() == {"settled": 4, "ready": 4}

    async def test_a_rewind_that_arrives_once_more_gives_back_nothing(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start(spec(max_staleness=3.0))
        await actors.feed(tasks(4))
        await actors.work()
        await actors.train(0)
        actors.epoch = (await queue.acquire("run", "second")).epoch
        assert await queue.rewind("run", epoch=actors.epoch, step=0) == 4
        await queue.take(
            "run", epoch=actors.epoch, step=0, groups=2, batch_id="again", wait_s=WAIT_S
        )
        await actors.settle(0, name="again")
        await actors.publish(1)
        assert await queue.rewind("run", epoch=actors.epoch, step=0) == 0
        assert await actors.resident() == {"settled": 4, "ready": 4}
        assert (await queue.run_state("run")).published == Version(actors.epoch, 1)

    async def test_a_take_that_arrives_after_its_step_was_committed_takes_nothing(
        self, queue: Queue
    ) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(2))
        await actors.work()
        await actors.train(0)
        await actors.commit(1)
        await actors.feed(tasks(4))
        await actors.work()
        with pytest.raises(ConflictError, match="step 0 is committed"):
            await actors.take(0)
        assert len((await actors.train(1)).rows) == 4

    async def test_what_was_committed_cannot_be_rewound(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(2))
        await actors.work()
        await actors.train(0)
        await actors.commit(1)
        with pytest.raises(ConflictError, match="step 1"):
            await queue.rewind("run", epoch=actors.epoch, step=0)

    async def test_after_a_rewind_admission_counts_what_came_back(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(2))
        await actors.work()
        await actors.train(0)
        actors.epoch = (await queue.acquire("run", "second")).epoch
        await queue.rewind("run", epoch=actors.epoch, step=0)
        with pytest.raises(WaitTimeoutError):
            await actors.feed(tasks(2, start=2))


class FaultPromises:
    async def fail_once(self, actors: Actors, stage: str = "rollout") -> Uid:
        lease = await actors.lease(stage, limit=1, wait_s=WAIT_S)
        row = lease.rows[0]
        await actors.queue.fail(
            "run", stage, row.uid, row.token, Outcome.INFRA_FAULT, "engine lost"
        )
        return row.uid

    async def test_a_failed_row_is_delivered_again_then_dead_lettered(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start(spec(max_attempts=2))
        await actors.feed(tasks(1, prompt_text="1 + 1 ☃? " * 50))
        uid = await self.fail_once(actors)
        assert await queue.dead_letters("run") == []
        assert await self.fail_once(actors) == uid
        (letter,) = await queue.dead_letters("run")
        assert (letter.uid, letter.stage, letter.attempts) == (uid, "rollout", 2)
        assert (letter.outcome, letter.reason) == (Outcome.INFRA_FAULT, "engine lost")
        assert letter.prompt == ("1 + 1 ☃? " * 50)[:200]

    async def test_a_worker_that_dies_with_a_row_uses_up_an_attempt(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start(spec(max_attempts=2, lease_ttl_s=0.05))
        await actors.feed(tasks(1))
        for _ in range(2):
            await actors.lease(wait_s=WAIT_S)
        await queue.close_feed("run")
        with pytest.raises(EndOfDataError):
            await actors.lease(wait_s=WAIT_S)
        assert {letter.reason for letter in await queue.dead_letters("run")} == {"lease expired"}

    async def test_policy_all_lets_the_whole_group_leave(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start(spec(max_attempts=1))
        await actors.feed(tasks(2))
        lease = await actors.lease(limit=2)
        dead, sibling = lease.rows
        await queue.fail("run", "rollout", dead.uid, dead.token, Outcome.TIMEOUT, "slow")
        ledger = await actors.ledger()
        assert ledger.dead_lettered == {"slow": 1}
        assert ledger.filtered == {"group_incomplete": 1}
        assert await queue.renew("run", "rollout", "w", [sibling.uid]) == [sibling.uid]
        assert await actors.feed(tasks(2, start=2)) == 1

    async def test_policy_k_of_n_takes_k_and_tells_the_true_size(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start(
            spec(group_size=3, batch_groups=1, group_policy=GroupPolicy.K_OF_N, group_k=2)
        )
        await actors.feed(tasks(1, group_size=3))
        slow = await actors.lease(limit=1)
        await actors.work()
        batch = await actors.take(0, groups=1)
        assert batch_uids(batch) == ["t0.1.0", "t0.2.0"]
        assert {row.group_size for row in batch.rows} == {3}
        assert (await actors.ledger()).filtered == {"k_of_n": 1}
        assert await queue.renew("run", "rollout", "w", [slow.rows[0].uid]) == [slow.rows[0].uid]

    async def test_policy_k_of_n_gives_up_when_k_can_never_be(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start(
            spec(group_size=3, group_policy=GroupPolicy.K_OF_N, group_k=2, max_attempts=1)
        )
        await actors.feed(tasks(1, group_size=3))
        await self.fail_once(actors)
        assert await actors.resident() == {"queued": 2}
        await self.fail_once(actors)
        ledger = await actors.ledger()
        assert (ledger.filtered, ledger.dead_lettered) == (
            {"group_incomplete": 1},
            {"engine lost": 2},
        )

    async def test_policy_replace_sibling_samples_a_fresh_attempt(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start(spec(max_attempts=1, group_policy=GroupPolicy.REPLACE_SIBLING))
        await actors.feed(tasks(1))
        await self.fail_once(actors)
        await actors.work()
        assert batch_uids(await actors.take(0, groups=1)) == ["t0.0.1", "t0.1.0"]
        assert (await actors.ledger()).admitted == 3

    async def test_policy_replace_sibling_ends_with_a_task_that_always_fails(
        self, queue: Queue
    ) -> None:
        actors = Actors(queue)
        await actors.start(spec(max_attempts=2, group_policy=GroupPolicy.REPLACE_SIBLING))
        await actors.feed([task("poison", group_size=1)])
        for _ in range(6):
            await self.fail_once(actors)
        assert await actors.resident() == {}
        assert len(await queue.dead_letters("run")) == 3

    async def test_a_replay_admits_the_task_again_as_new_attempts(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start(spec(max_attempts=1))
        await actors.feed(tasks(1))
        uid = await self.fail_once(actors)
        for expected in (1, 0):
            assert await queue.replay("run", [uid]) == expected
        assert await queue.dead_letters("run") == []
        lease = await actors.lease()
        assert uids(lease) == ["t0.0.1", "t0.1.1"]
        assert lease.rows[0].task.ground_truth == {"answer": 4}
        ledger = await actors.ledger()
        assert (ledger.admitted, ledger.dead_lettered) == (4, {"engine lost": 1})

    async def test_a_replay_joins_a_group_that_is_still_open(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start(spec(max_attempts=1, group_policy=GroupPolicy.K_OF_N, group_k=1))
        await actors.feed(tasks(1))
        uid = await self.fail_once(actors)
        assert await queue.replay("run", [uid]) == 1
        assert uids(await actors.lease()) == ["t0.0.1", "t0.1.0"]


class WhyPromises:
    async def test_a_take_that_waits_names_the_worker_who_has_the_rows(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(2))
        await actors.work(limit=2)
        held = await actors.lease(worker="slow-worker")
        waiting = asyncio.ensure_future(actors.take(0, wait_s=WAIT_S))
        reasons = await waiting_entries(
            queue, lambda one: one.what.startswith("take") and one.uids != ()
        )
        ages = [reason.since_s for reason in reasons]
        assert ages == sorted(ages, reverse=True)
        take = next(reason for reason in reasons if reason.what.startswith("take"))
        assert take.owners == ("slow-worker",)
        assert set(take.uids) == {row.uid for row in held.rows}
        stage = next(reason for reason in reasons if "stage rollout by slow-worker" in reason.what)
        assert set(stage.uids) == {row.uid for row in held.rows}
        waiting.cancel()

    async def test_a_take_that_waits_for_a_group_that_is_due_names_who_has_that_one(
        self, queue: Queue
    ) -> None:
        actors = Actors(queue)
        await actors.start(spec(max_staleness=1.0))
        await actors.feed(tasks(4))
        held = await actors.lease(limit=2, worker="slow-worker")
        await actors.work(limit=4)
        await actors.train(0)
        await actors.feed(tasks(2, start=4))
        await actors.work(limit=4)
        await actors.lease(worker="quick-worker")
        waiting = asyncio.ensure_future(actors.take(1, wait_s=WAIT_S))
        reasons = await waiting_entries(
            queue, lambda one: one.what.startswith("take") and one.uids != ()
        )
        take = next(reason for reason in reasons if reason.what.startswith("take"))
        assert "; 1 that are not would be too old at the next step" in take.what
        assert take.owners == ("slow-worker",)
        assert set(take.uids) == {row.uid for row in held.rows}
        waiting.cancel()

    async def test_a_waiting_feeder_gets_the_numbers(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(2))
        waiting = asyncio.ensure_future(actors.feed(tasks(1, start=2), wait_s=WAIT_S))
        reasons = await waiting_entries(
            queue, lambda one: one.what.startswith("admit waits for room")
        )
        assert any("2 of 2 groups" in reason.what for reason in reasons if reason.who == "feeder")
        waiting.cancel()

    async def test_an_expired_lease_is_named_with_who_lost_it(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start(spec(lease_ttl_s=1.5))  # the others must not expire, too
        await actors.feed(tasks(1))
        await actors.lease(limit=1, worker="lost-worker")
        await actors.lease(limit=1)
        again = await actors.lease(worker="other", wait_s=WAIT_S)
        await queue.release("run", "rollout", {row.uid: row.token for row in again.rows})
        reasons = await queue.why_waiting("run")
        assert any("lost-worker expired" in reason.what for reason in reasons), reasons

    async def test_nothing_blocks_in_an_empty_run(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        assert list(await queue.why_waiting("run")) == []


class QueueBatchSuite(TakePromises, SettlePromises, FaultPromises, WhyPromises):
    """Subclasses give a `queue` fixture."""
