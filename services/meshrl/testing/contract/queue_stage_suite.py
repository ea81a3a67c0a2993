"""Promises of every queue to the stages: leases, fencing, columns."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from meshrl.contract.errors import (
    EndOfDataError,
    FencedError,
    NotFoundError,
    UserError,
    WaitTimeoutError,
)
from meshrl.contract.held_rows import Held, HeldLeases
from meshrl.contract.ports import Queue
from meshrl.contract.rows import times_column, trajectory, with_media
from meshrl.contract.types import (
    CONVERSATION,
    MEDIA,
    REFERENCE_STAGE,
    REWARD_STAGE,
    REWARD_TIMES,
    ROLLOUT_STAGE,
    ROLLOUT_TIMES,
    Media,
    Outcome,
    RowWrite,
    StageSpec,
    Task,
    Version,
)
from meshrl.testing.contract.queue_actors import (
    WAIT_S,
    Actors,
    facts,
    rollout_of,
    spec,
    task,
    tasks,
    tokens_of,
    uids,
    waiting_entries,
)


def compared(task: Task) -> dict[str, Any]:
    """The fields that make two tasks equal; Python 3.13 would compare arrays by `==`."""
    values = {field.name: getattr(task, field.name) for field in fields(task) if field.compare}
    return {**values, "prompt_ids": task.prompt_ids.tolist()}


class LeasePromises:
    async def test_a_lease_brings_the_task_as_it_was_given(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        original = task("a/b.c")
        await actors.feed([original])
        row = (await actors.lease()).rows[0]
        assert compared(row.task) == compared(original)
        assert (row.delivery, dict(row.columns)) == (1, {})

    async def test_rows_come_oldest_first_and_siblings_together(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(2))
        first, second = uids(await actors.lease(limit=3)), uids(await actors.lease(limit=3))
        assert [row[-4:] for row in first] == [".0.0", ".1.0", ".0.0"]
        assert {*first, *second} == {"t0.0.0", "t0.1.0", "t1.0.0", "t1.1.0"}
        assert (first[::2], second) == (["t0.0.0", "t1.0.0"], ["t1.1.0"])

    async def test_a_task_of_higher_priority_is_leased_first(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed([task("late"), task("urgent", priority=1)])
        assert uids(await actors.lease(limit=2)) == ["urgent.0.0", "urgent.1.0"]

    async def test_a_run_of_higher_priority_is_served_first(self, queue: Queue) -> None:
        train, evaluation = Actors(queue), Actors(queue, run="run.eval")
        await train.start()
        await evaluation.start(spec("run.eval", gated=False, priority=1))
        await train.feed(tasks(1))
        await evaluation.feed([task("q", run="run.eval")])
        for expected in ("run.eval", "run"):
            lease = await queue.lease(
                ["run", "run.eval"],
                "rollout",
                worker="w",
                limit=9,
                version=train.version,
                wait_s=0,
            )
            assert {row.uid.run for row in lease.rows} == {expected}

    async def test_a_waiting_lease_is_answered_when_tasks_come_in(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        waiting = asyncio.ensure_future(actors.lease(wait_s=WAIT_S))
        await asyncio.sleep(0)
        await actors.feed(tasks(1))
        assert uids(await waiting) == ["t0.0.0", "t0.1.0"]

    async def test_a_lease_waits_for_a_run_that_nobody_opened_yet(self, queue: Queue) -> None:
        actors = Actors(queue)
        waiting = asyncio.ensure_future(actors.lease("reward", wait_s=WAIT_S))
        await asyncio.sleep(0)
        await actors.start()
        await actors.feed(tasks(1))
        await actors.write(await actors.lease("rollout"))
        assert len((await waiting).rows) == 2

    async def test_a_lease_with_nothing_to_give_times_out(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        with pytest.raises(WaitTimeoutError, match="rollout"):
            await actors.lease(wait_s=0.01)

    async def test_a_run_that_is_closed_and_empty_is_the_end_of_data(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        waiting = asyncio.ensure_future(actors.lease(wait_s=WAIT_S))
        await asyncio.sleep(0)
        await queue.close_feed("run")
        with pytest.raises(EndOfDataError):
            await waiting

    async def test_a_fixed_number_of_rows_is_waited_for_while_admission_can_add_some(
        self, queue: Queue
    ) -> None:
        actors = Actors(queue)
        await actors.start()

        async def lease_all() -> list[str]:
            lease = await queue.lease(
                ["run"],
                "rollout",
                worker="w",
                limit=3,
                at_least=3,
                version=actors.version,
                wait_s=WAIT_S,
            )
            return uids(lease)

        first = asyncio.ensure_future(lease_all())
        await actors.feed(tasks(1))
        assert not first.done()
        await actors.feed(tasks(1, start=1))
        leased_rows = [await first, await lease_all()]
        assert [len(rows) for rows in leased_rows] == [3, 1]
        assert leased_rows == [["t0.0.0", "t0.1.0", "t1.0.0"], ["t1.1.0"]]

    async def test_a_gated_run_gives_rollouts_only_to_engines_fresh_enough(
        self, queue: Queue
    ) -> None:
        actors = Actors(queue)
        await actors.start(spec(max_staleness=1.0))
        await actors.publish(2)
        await actors.feed(tasks(2))
        for version in (Version(1, 0), Version(0, 2)):
            actors.version = version
            with pytest.raises(WaitTimeoutError):
                await actors.lease()
        actors.version = Version(1, 1)
        assert len((await actors.lease()).rows) == 4

    async def test_a_gated_rollout_lease_must_name_its_version(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(1))
        with pytest.raises(UserError, match="version"):
            await queue.lease(["run"], "rollout", worker="w", limit=1, wait_s=0)

    async def test_a_lease_that_a_publish_made_too_old_ends_at_once(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        waiting = asyncio.ensure_future(actors.lease(wait_s=10 * WAIT_S))
        await waiting_entries(queue, lambda one: one.what.startswith("lease waits"))
        await actors.publish(1)
        with pytest.raises(WaitTimeoutError, match="ask again"):
            await asyncio.wait_for(waiting, WAIT_S)

    async def test_an_unknown_stage_is_refused_with_the_known_ones(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        with pytest.raises(UserError, match="rollout, reward"):
            await queue.lease(["run"], "reference", worker="w", limit=1, wait_s=0)

    async def test_a_lease_that_is_not_renewed_goes_to_somebody_else(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start(spec(lease_ttl_s=0.05))
        await actors.feed(tasks(1))
        old = await actors.lease(worker="dead")
        new = await actors.lease(worker="alive", wait_s=WAIT_S)
        assert new.rows[0].uid == old.rows[0].uid
        assert new.rows[0].delivery == 2
        assert new.rows[0].token > old.rows[0].token
        with pytest.raises(FencedError):
            await actors.write(old)

    async def test_a_renewed_lease_stays_and_lost_rows_are_named(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start(spec(lease_ttl_s=1.0))
        await actors.feed(tasks(1))
        first = (await actors.lease(limit=1, worker="a")).rows[0].uid
        second = (await actors.lease(limit=1, worker="b")).rows[0].uid
        for _ in range(5):
            assert await queue.renew("run", "rollout", "a", [first, second]) == [second]
            await asyncio.sleep(0.3)
        again = await actors.lease(worker="c")
        assert [row.uid for row in again.rows] == [second]

    async def test_kept_rows_outlive_their_time_to_live_and_lost_ones_are_named(
        self, queue: Queue
    ) -> None:
        actors = Actors(queue)
        await actors.start(spec(lease_ttl_s=1.0))
        await actors.feed(tasks(2))
        lost_rows: asyncio.Queue[Held] = asyncio.Queue()
        held_leases = HeldLeases("rollout", "a", lost_rows.put_nowait)
        keeping = asyncio.ensure_future(queue.renew_held(held_leases))
        lease = await actors.lease(limit=4, worker="a")
        held_leases.add(lease.rows, lease.ttl_s)
        with pytest.raises(WaitTimeoutError):
            await actors.lease(worker="b", wait_s=1.5)
        lost = lease.rows[3]
        await queue.release("run", "rollout", {lost.uid: lost.token})
        assert await asyncio.wait_for(lost_rows.get(), WAIT_S) == {lost.uid: lost.token}
        held_leases.drop([lost])
        await actors.write(lease, rows=lease.rows[:3])
        keeping.cancel()

    async def test_released_rows_are_delivered_again_and_no_attempt_is_counted(
        self, queue: Queue
    ) -> None:
        actors = Actors(queue)
        await actors.start(spec(max_attempts=1))
        await actors.feed(tasks(1))
        for _ in range(3):
            lease = await actors.lease()
            assert {row.delivery for row in lease.rows} == {1}
            await queue.release("run", "rollout", tokens_of(lease))
            await queue.release("run", "rollout", tokens_of(lease))
        assert await actors.resident() == {"queued": 2}


class WritePromises:
    async def test_a_stage_reads_what_the_earlier_ones_wrote(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start(spec(stages=(ROLLOUT_STAGE, REWARD_STAGE, REFERENCE_STAGE)))
        await actors.feed(tasks(1))
        await actors.write(await actors.lease())
        judged, compared = await actors.lease("reward"), await actors.lease("reference")
        text = judged.rows[1].columns["response_text"].tobytes().decode()
        assert text == "answer to run/t0/1.0"
        assert compared.rows[0].columns["tokens"].tolist() == [0, 1, 2, 3, 4, 5]
        assert set(compared.rows[0].columns) == {"tokens"}
        await actors.write(judged)
        assert await actors.resident() == {"pending": 2}
        await actors.write(compared)
        assert await actors.resident() == {"ready": 2}

    async def test_a_stage_may_leave_notes_that_its_spec_does_not_name(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(1))
        lease = await actors.lease()
        noted = [rollout_of(row, actors.version) for row in lease.rows]
        times = {ROLLOUT_TIMES: times_column(1.0, 2.5)}
        noted[0] = replace(noted[0], columns={**noted[0].columns, **times})
        await queue.write_rows(actors.run, lease.stage, tokens_of(lease), noted)
        await actors.write(await actors.lease("reward"))
        wanted = ("tokens", ROLLOUT_TIMES, CONVERSATION, REWARD_TIMES)
        first, second = await queue.fetch_rows(actors.run, [row.uid for row in noted], wanted)
        assert first[ROLLOUT_TIMES].tolist() == [1.0, 2.5] and set(second) == {"tokens"}

    async def test_pictures_come_with_a_task_and_once_with_each_group_of_a_fetch(
        self, queue: Queue
    ) -> None:
        actors, media = Actors(queue), (Media.of(b"one"), Media.of(b"two"))
        await actors.start()
        await actors.feed([task("t0", media=media), task("t1")])
        lease = await actors.lease()
        assert {row.uid.task: row.task.media for row in lease.rows} == {"t0": media, "t1": ()}
        await actors.write(lease)
        uids = sorted(row.uid for row in lease.rows)
        found = await queue.fetch_rows(actors.run, uids, ("tokens", MEDIA))
        assert [set(columns) for columns in found] == [
            {"tokens", MEDIA},
            {"tokens"},
            {"tokens"},
            {"tokens"},
        ]
        wanted = (*ROLLOUT_STAGE.writes, MEDIA)
        fetched = await queue.fetch_rows(actors.run, uids, wanted)
        rows = with_media([trajectory(*each) for each in zip(uids, fetched, strict=True)])
        assert [row.media for row in rows] == [media, media, (), ()]

    async def test_notes_have_their_stage_and_their_type(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(1))
        lease = await actors.lease()
        for name, column, said in (
            (
                REWARD_TIMES,
                times_column(1.0, 2.0),
                "column reward_times is not in what stage rollout",
            ),
            (ROLLOUT_TIMES, np.zeros(2, np.float32), "column rollout_times is float32"),
        ):
            row = rollout_of(lease.rows[0], actors.version)
            wrong = replace(row, columns={**row.columns, name: column})
            with pytest.raises(UserError, match=said):
                await queue.write_rows(actors.run, lease.stage, tokens_of(lease), [wrong])

    async def test_writing_twice_is_writing_once(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(1))
        lease = await actors.lease()
        await actors.write(lease)
        await actors.write(lease)
        assert await actors.resident() == {"pending": 2}

    async def test_a_fenced_row_refuses_the_whole_write(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(1))
        lease = await actors.lease()
        lost = lease.rows[1]
        await queue.release("run", "rollout", {lost.uid: lost.token})
        with pytest.raises(FencedError) as refused:
            await actors.write(lease)
        assert refused.value.details["uid"] == str(lost.uid)
        assert await actors.resident() == {"queued": 1, "leased": 1}

    @pytest.mark.parametrize(
        ("column", "value"),
        [
            ("tokens", np.zeros(6, np.int64)),
            ("loss_mask", np.zeros(5, np.uint8)),
            ("rollout_logprobs", np.zeros((6, 1), np.float32)),
            ("spans", np.zeros((1, 3), np.int64)),
            ("reward", np.zeros(1, np.float32)),
        ],
    )
    async def test_a_column_that_does_not_fit_is_refused_by_name(
        self, queue: Queue, column: str, value: np.ndarray
    ) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(1))
        lease = await actors.lease(limit=1)
        good = rollout_of(lease.rows[0], actors.version)
        bad = replace(good, columns={**good.columns, column: value})
        with pytest.raises(UserError, match=column) as refused:
            await queue.write_rows("run", "rollout", tokens_of(lease), [bad])
        assert refused.value.details["uid"] == str(good.uid)
        await queue.write_rows("run", "rollout", tokens_of(lease), [good])

    async def test_a_missing_column_is_refused_by_name(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(1))
        lease = await actors.lease(limit=1)
        good = rollout_of(lease.rows[0], actors.version)
        columns_left = {name: array for name, array in good.columns.items() if name != "spans"}
        with pytest.raises(UserError, match="spans is missing"):
            await queue.write_rows(
                "run", "rollout", tokens_of(lease), [replace(good, columns=columns_left)]
            )

    @pytest.mark.parametrize(
        ("column", "value", "said"),
        [
            ("tokens", np.array([0, 1, 2, 3, 9, 5], np.int32), "holds 9 at 4, want 0 to 8"),
            ("tokens", np.array([0, -1, 2, 3, 4, 5], np.int32), "holds -1 at 1, want 0 to 8"),
            ("loss_mask", np.array([0, 0, 0, 1, 7, 1], np.uint8), "holds 7 at 4, want 0 or 1"),
            ("rollout_logprobs", np.array([0, 0, 0, 0, 0, np.nan], np.float32), "holds nan at 5"),
            ("spans", np.array([[1, 0, 3, 7]]), r"holds \[1, 0, 3, 7\] at 0, want spans"),
            ("response_text", np.array([0xC3], np.uint8), "is no UTF-8 text"),
        ],
    )
    async def test_a_value_that_no_row_may_have_is_refused_by_row_column_and_value(
        self, queue: Queue, column: str, value: np.ndarray, said: str
    ) -> None:
        actors = Actors(queue)
        await actors.start(spec(vocabulary=9))
        await actors.feed(tasks(1))
        lease = await actors.lease()
        good, other = (rollout_of(row, actors.version) for row in lease.rows)
        bad = replace(other, columns={**other.columns, column: value})
        with pytest.raises(UserError, match=f"row {other.uid}: column {column} {said}") as refused:
            await queue.write_rows("run", "rollout", tokens_of(lease), [good, bad])
        assert refused.value.details["uid"] == str(bad.uid)
        assert await actors.resident() == {"leased": 2}
        await queue.write_rows("run", "rollout", tokens_of(lease), [good, other])

    @pytest.mark.parametrize("reward", [[np.nan], [-np.inf], [1.0, 1.0], []])
    async def test_a_reward_that_is_no_number_never_gets_in(
        self, queue: Queue, reward: list[float]
    ) -> None:
        actors = Actors(queue)
        stage = StageSpec(name="reward", reads=("response_text",), writes=("reward",))
        await actors.start(spec(stages=(ROLLOUT_STAGE, stage)))
        await actors.feed(tasks(1))
        await actors.write(await actors.lease())
        lease = await actors.lease("reward")
        good, bad = (
            RowWrite(uid=row.uid, columns={"reward": np.array(value, np.float32)})
            for row, value in zip(lease.rows, ([1.0], reward), strict=True)
        )
        with pytest.raises(UserError, match="finite") as refused:
            await queue.write_rows("run", "reward", tokens_of(lease), [good, bad])
        assert refused.value.details["uid"] == str(bad.uid)

    @pytest.mark.parametrize("outcome", [o for o in Outcome if not o.trainable])
    async def test_a_fault_can_never_become_a_row(self, queue: Queue, outcome: Outcome) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(1))
        lease = await actors.lease(limit=1)
        bad = replace(
            rollout_of(lease.rows[0], actors.version), facts=facts(actors.version, 6, outcome)
        )
        with pytest.raises(UserError, match="use fail"):
            await queue.write_rows("run", "rollout", tokens_of(lease), [bad])

    async def test_payload_comes_back_bit_by_bit_and_in_the_order_asked(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(1))
        lease = await actors.lease()
        await actors.write(lease)
        written = {row.uid: rollout_of(row, actors.version).columns for row in lease.rows}
        order = [row.uid for row in reversed(lease.rows)]
        for uid, columns in zip(
            order, await queue.fetch_rows("run", order, ROLLOUT_STAGE.writes), strict=True
        ):
            assert set(columns) == set(ROLLOUT_STAGE.writes)
            for name, array in columns.items():
                assert array.dtype == written[uid][name].dtype
                np.testing.assert_array_equal(array, written[uid][name])

    async def test_what_is_not_there_is_not_found_by_uid(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(1))
        uid = (await actors.lease()).rows[0].uid
        for missing, column in ((uid, "tokens"), (replace(uid, attempt=7), "tokens")):
            with pytest.raises(NotFoundError) as refused:
                await queue.fetch_rows("run", [missing], [column])
            assert refused.value.details["uid"] == str(missing)
        with pytest.raises(UserError, match="toekns"):
            await queue.fetch_rows("run", [uid], ["toekns"])

    @pytest.mark.parametrize(
        "wrong",
        [
            {"outcome": Outcome.TIMEOUT},
            {"oldest": Version(9, 9)},
            {"num_tokens": 5},
            {"prompt_tokens": 99},
            {"prompt_tokens": -1},
        ],
    )
    async def test_facts_that_make_no_sense_are_refused_with_their_row(
        self, queue: Queue, wrong: dict[str, Any]
    ) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(1))
        lease = await actors.lease()
        good, bad = (rollout_of(row, actors.version) for row in lease.rows)
        wrong_facts = facts(actors.version, 6)._replace(**wrong)
        with pytest.raises(UserError) as refused:
            await queue.write_rows(
                "run", "rollout", tokens_of(lease), [good, replace(bad, facts=wrong_facts)]
            )
        assert refused.value.details["uid"] == str(bad.uid)
        await queue.write_rows("run", "rollout", tokens_of(lease), [good, bad])
