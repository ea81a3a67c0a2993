"""Promises of every queue about work that is interrupted, partly done, or done again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshrl.contract.errors import ConflictError, FencedError, UserError
from meshrl.contract.frames import Frame, pack
from meshrl.contract.ports import Queue
from meshrl.contract.types import (
    REFERENCE_STAGE,
    REWARD_STAGE,
    ROLLOUT_STAGE,
    GroupPolicy,
    LeasedBlock,
    Outcome,
    RowBlock,
    RowWrite,
    StageSpec,
)
from meshrl.testing.contract.queue_actors import Actors, spec, tasks, tokens_of


def more_of(block: LeasedBlock, start: int, stop: int, rows: int = 2) -> RowBlock:
    """Entries `[start, stop)` of the first rows of a block; row i says 100 i + the entry."""
    return RowBlock(
        task=block.task,
        indices=block.indices[:rows],
        attempts=block.attempts[:rows],
        token=block.token,
        starts=(start,) * rows,
        frames=(
            Frame(
                pack(
                    [
                        {"tokens": np.arange(start, stop, dtype=np.int32) + 100 * i}
                        for i in range(rows)
                    ]
                )
            ),
        ),
    )


class AppendPromises:
    async def test_what_was_appended_goes_to_the_next_holder(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(1))
        lease = await actors.lease()
        (block,) = lease.blocks
        assert all(not row.prefix for row in lease.rows)
        await queue.append("run", "rollout", [more_of(block, 0, 3)])
        await queue.append("run", "rollout", [more_of(block, 3, 5, rows=1)])
        uid = lease.rows[0].uid
        await queue.fail("run", "rollout", uid, block.token, Outcome.INFRA_FAULT, "engine died")
        (again,) = (await actors.lease()).rows
        assert (again.uid, again.delivery) == (uid, 2)
        assert again.prefix["tokens"].tolist() == [0, 1, 2, 3, 4]
        await queue.release("run", "rollout", {lease.rows[1].uid: block.token})
        (other,) = (await actors.lease()).rows
        assert other.prefix["tokens"].tolist() == [100, 101, 102]

    async def test_a_fresh_attempt_begins_with_nothing_of_the_one_before(
        self, queue: Queue
    ) -> None:
        actors = Actors(queue)
        await actors.start(spec(max_attempts=1, group_policy=GroupPolicy.REPLACE_SIBLING))
        await actors.feed(tasks(1))
        lease = await actors.lease()
        (block,) = lease.blocks
        await queue.append("run", "rollout", [more_of(block, 0, 3)])  # of both rows, in one frame
        uid = lease.rows[0].uid
        await queue.fail("run", "rollout", uid, block.token, Outcome.POLICY_FAULT, "no answer")
        (fresh,) = (await actors.lease()).rows
        assert (fresh.uid.index, fresh.uid.attempt) == (uid.index, 1)
        assert not fresh.prefix
        await queue.release("run", "rollout", {lease.rows[1].uid: block.token})
        (other,) = (await actors.lease()).rows
        assert other.prefix["tokens"].tolist() == [100, 101, 102]

    async def test_a_row_that_one_call_appends_to_twice_is_refused(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(1))
        (block,) = (await actors.lease()).blocks
        with pytest.raises(UserError, match="appended to twice in one call"):
            await queue.append("run", "rollout", [more_of(block, 0, 3), more_of(block, 0, 1)])
        await queue.append("run", "rollout", [more_of(block, 0, 3)])

    async def test_appending_twice_is_appending_once(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(1))
        lease = await actors.lease()
        (block,) = lease.blocks
        for _ in range(2):
            await queue.append("run", "rollout", [more_of(block, 0, 3)])
            await queue.append("run", "rollout", [more_of(block, 3, 4)])
        await queue.release("run", "rollout", tokens_of(lease))
        assert [row.prefix["tokens"].tolist() for row in (await actors.lease()).rows] == [
            [0, 1, 2, 3],
            [100, 101, 102, 103],
        ]

    async def test_a_write_ends_what_was_appended(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(1))
        lease = await actors.lease()
        await queue.append("run", "rollout", [more_of(lease.blocks[0], 0, 3)])
        await actors.write(lease)
        judged = await actors.lease("reward")
        assert all(not row.prefix for row in judged.rows)
        await actors.write(judged)
        batch = await actors.take(0, groups=1)
        (columns, _) = await queue.fetch_rows("run", [row.uid for row in batch.rows], ["tokens"])
        assert columns["tokens"].tolist() == [0, 1, 2, 3, 4, 5]

    async def test_a_gap_and_a_lost_lease_are_refused(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(1))
        lease = await actors.lease()
        (block,) = lease.blocks
        with pytest.raises(ConflictError, match="entries 0 to 2 were never appended") as gap:
            await queue.append("run", "rollout", [more_of(block, 2, 3)])
        assert gap.value.details["uid"] == str(lease.rows[0].uid)
        await queue.release("run", "rollout", tokens_of(lease))
        with pytest.raises(FencedError, match="the lease ended"):
            await queue.append("run", "rollout", [more_of(block, 0, 1)])

    @pytest.mark.parametrize(
        ("columns", "said"),
        [
            ({"tokens": np.array([3, 9], np.int32)}, "tokens holds 9 at 1, want 0 to 8"),
            ({"tokens": np.array([3], np.int64)}, "tokens is int64"),
            ({"rollout_logprobs": np.array([-np.inf], np.float32)}, "holds -inf at 0"),
        ],
    )
    async def test_a_value_that_no_row_may_have_is_not_appended(
        self, queue: Queue, columns: dict[str, np.ndarray], said: str
    ) -> None:
        actors = Actors(queue)
        await actors.start(spec(vocabulary=9))
        await actors.feed(tasks(1))
        lease = await actors.lease()
        good = more_of(lease.blocks[0], 0, 3, rows=1)
        with pytest.raises(UserError, match=said) as refused:
            await queue.append("run", "rollout", [replace(good, frames=(Frame(pack([columns])),))])
        assert refused.value.details["uid"] == str(lease.rows[0].uid)
        await queue.append("run", "rollout", [good])
        await queue.release("run", "rollout", tokens_of(lease))
        assert (await actors.lease()).rows[0].prefix["tokens"].tolist() == [0, 1, 2]

    async def test_only_a_stage_that_samples_appends(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        await actors.feed(tasks(1))
        await actors.write(await actors.lease())
        (block,) = (await actors.lease("reward")).blocks
        with pytest.raises(UserError, match="stage reward reads columns"):
            await queue.append("run", "reward", [more_of(block, 0, 1)])


class RedoPromises:
    async def test_a_stage_works_again_on_rows_that_it_wrote(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start(spec(stages=(ROLLOUT_STAGE, REWARD_STAGE, REFERENCE_STAGE)))
        await actors.feed(tasks(2))
        await actors.work()
        await actors.write(await actors.lease("reference"))
        assert await actors.resident() == {"ready": 4}
        (first, *_) = (await actors.take(0, groups=1)).rows
        assert await queue.redo("run", "reward", ()) == 2  # those in a batch stay as they are
        assert await actors.resident() == {"pending": 2, "taken": 2}
        lease = await actors.lease("reward")
        assert {row.uid.task for row in lease.rows} == {"t0", "t1"} - {first.group}
        assert {row.delivery for row in lease.rows} == {1}
        await actors.write(lease)
        assert await actors.resident() == {"ready": 2, "taken": 2}

    async def test_stages_that_read_what_goes_work_again_too(self, queue: Queue) -> None:
        polish = StageSpec(name="polish", reads=("reward",), writes=("polished",))
        actors = Actors(queue)
        await actors.start(spec(stages=(ROLLOUT_STAGE, REWARD_STAGE, polish)))
        await actors.feed(tasks(1))
        await actors.work()
        held = await actors.lease("polish")
        assert await queue.redo("run", "reward", [held.rows[0].uid]) == 1
        (again,) = (await actors.lease("reward")).rows
        assert again.uid == held.rows[0].uid
        late = [RowWrite(uid=row.uid, columns={"polished": np.zeros(1)}) for row in held.rows]
        with pytest.raises(FencedError, match=str(again.uid)):
            await queue.write_rows("run", "polish", tokens_of(held), late)

    async def test_what_was_sampled_is_not_sampled_again(self, queue: Queue) -> None:
        actors = Actors(queue)
        await actors.start()
        with pytest.raises(UserError, match="stage rollout samples"):
            await queue.redo("run", "rollout", ())


class QueueRepeatSuite(AppendPromises, RedoPromises):
    pass
