"""Checkpoints of running responses in the queue: drains, lost leases, new versions, a failing queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.contract.errors import UnavailableError
from meshrl.contract.frames import Frame, pack
from meshrl.contract.types import (
    GenerateRequest,
    Lease,
    RowBlock,
    SamplingParams,
    Task,
    Uid,
    Version,
    VersionSpan,
)
from meshrl.rollout.config import CheckpointIntervals, RowSchedule
from meshrl.rollout.generation_checkpoint import GenerationCheckpointer
from meshrl.rollout.ports import Generator, Rollout
from meshrl.rollout.programs import ProgramCache, single_turn
from meshrl.rollout.streams import sample
from meshrl.rollout.tokenizer import Tokenizer
from meshrl.rollout.worker import RolloutWorker
from meshrl.testing.engines import echo
from meshrl.testing.engines.echo import Behaviour
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from ..waiting import resident, until
from .test_rollout_worker import FIRST, RUN, Words, commit, open_run, tasks, trajectories

NEXT = Version(1, 1)
LENGTH = 96
"""Tokens of each response; a delta has 4."""
OFTEN = CheckpointIntervals(tokens=16, ms=0)


class Recorded:
    """A queue that records leases and appends; a test says what happens to an append."""

    def __init__(self, queue: TransferQueue) -> None:
        self._queue = queue
        self.leases: list[Lease] = []
        self.appends: list[Sequence[RowBlock]] = []
        self.running = self.most = 0
        self.after_append: Callable[[], Any] | None = None
        """Awaited after an append; the worker gets what it raises."""
        self.accepts = True
        """False: appends do not arrive."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    async def lease(self, *args: Any, **options: Any) -> Lease:
        lease = await self._queue.lease(*args, **options)
        self.leases.append(lease)
        return lease

    async def append(self, run: str, stage: str, blocks: Sequence[RowBlock]) -> None:
        self.appends.append(blocks)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.accepts:
                await self._queue.append(run, stage, blocks)
            if self.after_append is not None:
                await self.after_append()
        finally:
            self.running -= 1


@pytest.fixture
async def queue() -> AsyncIterator[Recorded]:
    opened = await TransferQueue.open(MemoryStore())
    yield Recorded(opened)
    await opened.close()


@asynccontextmanager
async def serving(path: Path, version: Version = FIRST, rate: float = 4000) -> AsyncIterator[Any]:
    options = {"tokens_per_s": rate, "tokens_per_delta": 4, "response_tokens": LENGTH}
    engine = echo.build(options, model=path, slots=8)
    await engine.start()
    await commit(engine, version)
    yield engine
    await engine.close()


def worker_of(queue: Any, engine: Any, name: str = "w0", **options: Any) -> RolloutWorker:
    options = {"checkpoint": OFTEN, "programs": ProgramCache(__name__)} | options
    programs = options.pop("programs", None)
    schedule = RowSchedule(slots=8, **options)
    return RolloutWorker(
        queue, engine, Words(), runs=[RUN], worker=name, schedule=schedule, programs=programs
    )


def checkpointer_of(worker: RolloutWorker) -> GenerationCheckpointer:
    assert worker.checkpointer is not None
    return worker.checkpointer


def long(count: int, **changes: Any) -> list[Task]:
    return tasks(count, sampling=SamplingParams(max_tokens=LENGTH + 4), **changes)


async def drain_a_worker(queue: Recorded, engine: Any, **options: Any) -> None:
    """Run a worker until it has saved tokens of every row, then drain it."""
    worker = worker_of(queue, engine, **options)
    running = asyncio.create_task(worker.run(grace_s=60))
    await until(lambda: checkpointer_of(worker).stats.tokens >= 8 * 8)
    # Tokens between engine and program at the drain would be sampled again, so wait until they have arrived.
    engine.behave(Behaviour.STALL)
    await until(lambda: recorded(worker) == engine.stats().tokens_generated)
    worker.drain()
    async with asyncio.timeout(120):
        await running
    assert (await queue.ledger(RUN)).resident["queued"] == 8


def recorded(worker: RolloutWorker) -> int:
    """Tokens of running responses that the worker has recorded."""
    return sum(
        row.saved + sum(len(delta.tokens) for delta in (*row.sending, *row.unsent))
        for row in checkpointer_of(worker)._rows.values()
    )


async def finished(queue: Recorded, engine: Any, **options: Any) -> tuple[RolloutWorker, list[Any]]:
    """A worker that finishes the rest, and all rows."""
    worker = worker_of(queue, engine, name="w1", **options)
    running = asyncio.create_task(worker.run(grace_s=5))
    rows = await trajectories(queue, RUN, 2)
    worker.drain()
    await running
    return worker, rows


async def test_a_drain_moves_running_responses_and_not_a_token_is_sampled_twice(
    queue: Recorded, tmp_path: Path
) -> None:
    await open_run(queue, long(2), max_attempts=1)
    async with serving(tmp_path) as first, serving(tmp_path) as second:
        await drain_a_worker(queue, first)
        done_before = first.stats().tokens_generated
        assert 0 < done_before < 8 * LENGTH
        worker, rows = await finished(queue, second)
        assert done_before + second.stats().tokens_generated == 8 * LENGTH
    assert checkpointer_of(worker).stats.continued == done_before
    for row in rows:
        prompt = row.tokens[: row.prompt_length]
        assert row.tokens.tolist() == np.resize(prompt, len(prompt) + LENGTH).tolist()
        assert row.spans == (
            VersionSpan(version=FIRST, start=len(prompt), end=len(prompt) + LENGTH),
        )
        assert len(row.loss_mask) == len(row.rollout_logprobs) == len(row.tokens)
        assert (row.rollout_logprobs[len(prompt) :] == echo.LOGPROB).all()
    assert (await queue.ledger(RUN)).balanced


async def test_tokens_keep_the_version_that_sampled_them(queue: Recorded, tmp_path: Path) -> None:
    await open_run(queue, long(2), max_staleness=1.0)
    async with serving(tmp_path) as first, serving(tmp_path, NEXT) as second:
        await drain_a_worker(queue, first)
        await queue.publish(RUN, NEXT)
        _, rows = await finished(queue, second, max_staleness=1.0)
    for row in rows:
        start = row.prompt_length
        old, new = row.spans
        assert (old.version, old.start, new.version) == (FIRST, start, NEXT)
        assert start < old.end == new.start < new.end == start + LENGTH
    batch = await queue.take(RUN, epoch=1, step=0, groups=2, batch_id="b", wait_s=0)
    assert {(row.oldest, row.newest) for row in batch.rows} == {(FIRST, NEXT)}
    await queue.settle(RUN, epoch=1, step=0, batch_id="b")


async def test_a_prefix_that_is_too_stale_is_not_continued(queue: Recorded, tmp_path: Path) -> None:
    await open_run(queue, long(2), max_staleness=1.0)
    async with serving(tmp_path) as first, serving(tmp_path, NEXT) as second:
        await drain_a_worker(queue, first)
        appended = len(queue.appends)
        _, rows = await finished(queue, second, max_staleness=0.0)
        assert second.stats().tokens_generated == 8 * LENGTH
    assert {span.version for row in rows for span in row.spans} == {NEXT}
    assert len(queue.appends) == appended  # the queue has other tokens there


async def test_a_checkpoint_with_other_columns_is_ignored(
    queue: Recorded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await open_run(queue, long(2))
    lease = await queue.lease(
        [RUN], "rollout", worker="other", limit=8, at_least=8, version=FIRST, wait_s=5
    )
    foreign = [
        RowBlock(
            task=block.task,
            indices=block.indices,
            attempts=block.attempts,
            token=block.token,
            starts=(0,) * len(block),
            frames=(Frame(pack([{"thoughts": np.arange(3)} for _ in block.indices])),),
        )
        for block in lease.blocks
    ]
    await queue.append(RUN, "rollout", foreign)
    await queue.release(RUN, "rollout", lease.token_of())
    async with serving(tmp_path) as engine:
        _, rows = await finished(queue, engine)
    assert all(len(row.tokens) == row.prompt_length + LENGTH for row in rows)
    assert "not the checkpoint of a response: thoughts int64(3,)" in caplog.text


async def test_an_append_whose_response_is_lost_is_repeated_and_counts_once(
    queue: Recorded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fate = iter([True, True, False, True])

    async def lose_the_answer() -> None:
        if next(fate, False):
            raise UnavailableError("queue cannot be reached")

    queue.after_append = lose_the_answer
    await open_run(queue, long(2))
    async with serving(tmp_path) as first, serving(tmp_path) as second:
        await drain_a_worker(queue, first)
        done_before = first.stats().tokens_generated
        queue.after_append = None
        _, rows = await finished(queue, second)
        assert done_before + second.stats().tokens_generated == 8 * LENGTH
    for row in rows:
        prompt = row.tokens[: row.prompt_length]
        assert row.tokens.tolist() == np.resize(prompt, len(prompt) + LENGTH).tolist()
    said = [r for r in caplog.records if "running responses are not saved for now" in r.message]
    assert len(said) == 2  # once per outage


async def test_a_queue_that_refuses_appends_blocks_nothing(
    queue: Recorded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse() -> None:
        raise UnavailableError("queue cannot be reached")

    queue.after_append, queue.accepts = refuse, False
    await open_run(queue, long(2))
    async with serving(tmp_path) as engine:
        _, rows = await finished(queue, engine)
    assert all(len(row.tokens) == row.prompt_length + LENGTH for row in rows)
    assert len(queue.appends) > 1
    assert sum("not saved for now" in record.message for record in caplog.records) == 1


async def test_a_slow_append_delays_nothing_and_is_the_only_one(
    queue: Recorded, tmp_path: Path
) -> None:
    queue.after_append = asyncio.Event().wait
    await open_run(queue, long(2))
    async with serving(tmp_path) as engine:
        _, rows = await finished(queue, engine)
    assert all(len(row.tokens) == row.prompt_length + LENGTH for row in rows)
    assert (len(queue.appends), queue.most) == (1, 1)


async def test_appends_of_all_rows_go_in_one_call(queue: Recorded, tmp_path: Path) -> None:
    await open_run(queue, long(2))
    async with serving(tmp_path) as engine:
        await finished(queue, engine)
    sizes = [sum(map(len, groups)) for groups in queue.appends]
    assert max(sizes) == 8
    assert len(queue.appends) <= LENGTH // 8 + 1
    assert queue.most == 1


async def test_a_row_that_another_worker_holds_is_dropped_and_its_siblings_continue(
    queue: Recorded, tmp_path: Path
) -> None:
    await open_run(queue, long(2))
    async with serving(tmp_path, rate=1000) as engine:
        worker = worker_of(queue, engine)
        running = asyncio.create_task(worker.run(grace_s=5))
        await until(lambda: checkpointer_of(worker).stats.tokens >= 8 * 8)
        row = queue.leases[0].rows[0]
        await queue.release(RUN, "rollout", {row.uid: row.token})
        rows = await trajectories(queue, RUN, 2)
        worker.drain()
        await running
    assert worker.stats.lost == 1
    assert worker.stats.leased == 9  # the row again, by this worker as it happens
    assert checkpointer_of(worker).stats.continued >= 8
    assert all(len(each.tokens) == each.prompt_length + LENGTH for each in rows)
    assert (await queue.ledger(RUN)).balanced


async def test_the_timer_saves_the_tokens_of_a_slow_engine(queue: Recorded, tmp_path: Path) -> None:
    await open_run(queue, long(2))
    async with serving(tmp_path) as engine:
        worker = worker_of(queue, engine, checkpoint=CheckpointIntervals(tokens=0, ms=10))
        running = asyncio.create_task(worker.run(grace_s=5))
        await until(lambda: checkpointer_of(worker).stats.tokens > 0)
        engine.behave(Behaviour.STALL)
        worker.drain()
        await running
    assert queue.appends


async def test_a_response_that_ends_at_once_is_never_saved(queue: Recorded, tmp_path: Path) -> None:
    await open_run(queue, tasks(2, sampling=SamplingParams(max_tokens=4)))
    async with serving(tmp_path) as engine:
        worker, _ = await finished(queue, engine)
    assert (queue.appends, checkpointer_of(worker).stats.tokens) == ([], 0)


async def test_a_worker_without_intervals_saves_nothing(queue: Recorded, tmp_path: Path) -> None:
    off = CheckpointIntervals(tokens=0, ms=0)
    async with serving(tmp_path) as engine:
        assert worker_of(queue, engine, checkpoint=off).checkpointer is None
        assert worker_of(queue, engine, checkpoint=None).checkpointer is None
        assert worker_of(queue, engine, deterministic=True).checkpointer is None


async def run(task: Task, uid: Uid, engine: Generator, tokenizer: Tokenizer) -> Rollout:
    """A program of two turns that hands the second back; named by its dotted path."""
    await single_turn.run(task, uid, engine, tokenizer)
    rollout = await single_turn.run(task, uid, engine, tokenizer)
    other = GenerateRequest(
        request_id=f"{uid}/3", prompt_ids=task.prompt_ids[:2], sampling=task.sampling
    )
    assert (await sample(engine, other)).tokens.tolist() == [3, 4] * (LENGTH // 2)
    return rollout


async def test_only_the_first_response_of_a_program_is_saved(
    queue: Recorded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    await open_run(queue, long(2, program=__name__))
    async with serving(tmp_path) as first, serving(tmp_path) as second:
        await drain_a_worker(queue, first)
        done_before = first.stats().tokens_generated
        _, rows = await finished(queue, second)
        assert done_before + second.stats().tokens_generated == 3 * 8 * LENGTH
    for row in rows:
        prompt = row.tokens[: row.prompt_length]
        assert row.tokens.tolist() == np.resize(prompt, len(prompt) + LENGTH).tolist()
    starts = [
        (group.task, index, start)
        for groups in queue.appends
        for group in groups
        for index, start in zip(group.indices, group.starts, strict=True)
    ]
    assert len(set(starts)) == len(starts)
    assert not caplog.records


async def test_later_turns_of_a_program_continue_within_the_grace(
    queue: Recorded, tmp_path: Path
) -> None:
    await open_run(queue, long(2, program=__name__))
    async with serving(tmp_path) as engine:
        worker = worker_of(queue, engine)
        running = asyncio.create_task(worker.run(grace_s=60))
        await until(lambda: engine.stats().tokens_generated > 1.5 * 8 * LENGTH)
        worker.drain()
        await running
        assert (await resident(queue, RUN, "ready", 8)).balanced
