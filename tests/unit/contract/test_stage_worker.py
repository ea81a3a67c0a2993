"""The loop of a stage: whose results are on their way back takes no place, and the queue's silence is a bound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshrl.contract.errors import UserError
from meshrl.contract.frames import Frame, pack
from meshrl.contract.stage_worker import Failure, Intake, StageWorker
from meshrl.contract.types import (
    ROLLOUT_STAGE,
    Lease,
    LeasedRow,
    Outcome,
    RowBlock,
    RowWrite,
    Uid,
    Version,
)
from meshrl.testing.contract.queue_actors import Actors, rollout_of, spec, tasks
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from ...waiting import answered, until

ROWS, LIMIT = 12, 2
VERSION = Version(1, 0)


class Shut(TransferQueue):
    """Takes no result until `accepts` is set."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.accepts = asyncio.Event()

    async def write(self, run: str, stage: str, blocks: Sequence[RowBlock]) -> None:
        await self.accepts.wait()
        await super().write(run, stage, blocks)


@pytest.fixture
async def queue() -> AsyncIterator[Shut]:
    made = await Shut.open(MemoryStore())
    actors = Actors(made)
    await actors.start(spec(group_size=1, batch_groups=ROWS))
    await actors.feed(tasks(ROWS, group_size=1))
    yield made
    await made.close()


def worker_of(queue: TransferQueue, handle: Any, **intake: int) -> StageWorker:
    """A worker of the rollout stage that has `VERSION`."""
    return StageWorker(
        queue,
        ["run"],
        ROLLOUT_STAGE,
        handle,
        worker="w",
        intake=Intake(version=lambda: VERSION, **intake),
    )


async def test_a_result_that_is_being_written_takes_no_place(queue: Shut) -> None:
    begun = 0
    changed = asyncio.Event()

    async def handle(rows: Sequence[LeasedRow]) -> list[RowWrite]:
        nonlocal begun
        begun += len(rows)
        changed.set()
        return [rollout_of(row, VERSION) for row in rows]

    loop = worker_of(queue, handle, limit=LIMIT)
    running = asyncio.create_task(loop.run())

    async def until(rows: int) -> None:
        async with asyncio.timeout(60):
            while begun < rows:
                changed.clear()
                await changed.wait()

    await until(2 * LIMIT)  # none of them is in the queue
    for _ in range(100):
        loop.wake()
        await asyncio.sleep(0)
    assert begun == 2 * LIMIT  # a queue that takes none back is given no more to wait for
    queue.accepts.set()
    await until(ROWS)
    loop.drain()
    await running
    assert loop.stats.written == ROWS


async def test_a_row_that_comes_again_ends_the_work_on_it_before_it_begins_anew(
    queue: Shut,
) -> None:
    queue.accepts.set()
    seen: list[str] = []
    never = asyncio.Event()

    async def handle(rows: Sequence[LeasedRow]) -> list[RowWrite]:
        (row,) = rows
        if row.uid.task == "t0" and not seen:
            seen.append("taken back")
            # As if the connection had broken: the queue takes the row back, and nobody tells the worker.
            await queue.release("run", ROLLOUT_STAGE.name, {row.uid: row.token})
            try:
                await never.wait()
            finally:
                await asyncio.sleep(0.01)  # what the program of the row cleans up
                seen.append("cleaned")
        if row.uid.task == "t0":
            seen.append("again")
        return [rollout_of(row, VERSION) for row in rows]

    loop = worker_of(queue, handle, limit=LIMIT)
    running = asyncio.create_task(loop.run())
    await until(lambda: loop.stats.written >= ROWS)
    assert seen == ["taken back", "cleaned", "again"] and loop.stats.lost == 1
    loop.drain()
    await running


async def work_until_all_failed(
    queue: Shut, handle: Callable[[Sequence[LeasedRow]], Awaitable[list[Failure]]]
) -> StageWorker:
    loop = worker_of(queue, handle, limit=1)
    running = asyncio.create_task(loop.run())
    await until(lambda: loop.stats.failed >= ROWS)
    loop.drain()
    await running
    return loop


async def test_a_handler_that_exits_fails_its_rows_and_the_worker_goes_on(queue: Shut) -> None:
    async def handle(rows: Sequence[LeasedRow]) -> list[Failure]:
        raise SystemExit(3)

    await work_until_all_failed(queue, handle)


async def test_the_first_failure_of_each_kind_is_a_warning_and_why_waiting_tells_the_last(
    queue: Shut, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(rows: Sequence[LeasedRow]) -> list[Failure]:
        (row,) = rows
        what = "TypeError: no" if row.uid.task == "t1" else f"KeyError: 'nope{row.uid.task}'"
        reason = f"{what} at reward.py:3 in compute_score"
        return [Failure(uid=row.uid, outcome=Outcome.INFRA_FAULT, reason=reason)]

    loop = await work_until_all_failed(queue, handle)
    warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 2, warnings
    assert "KeyError: 'nope" in warnings[0] and "at reward.py:3 in compute_score" in warnings[0]
    assert "TypeError: no at reward.py:3" in warnings[1]
    entries = [wait for wait in await queue.why_waiting("run") if wait.who == "stage rollout"]
    (entry,) = entries
    assert f"rows that fail ({loop.stats.failed} times since the first): " in entry.what
    assert "at reward.py:3 in compute_score" in entry.what and len(entry.uids) == 1


async def test_lost_rows_are_told_now_and_then_with_their_number(
    queue: Shut, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group with a dead-lettered row takes the others from their workers: hundreds of rows a minute."""
    held: list[Uid] = []

    async def handle(rows: Sequence[LeasedRow]) -> list[Failure]:
        held.extend(row.uid for row in rows)
        await asyncio.Event().wait()
        raise AssertionError

    loop = worker_of(queue, handle, limit=ROWS)
    working = asyncio.create_task(loop.run())
    await until(lambda: len(held) >= ROWS)
    for uid in held[:3]:
        loop.forget({uid})
    told = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert told == [f"rollout: 1 row lost, the last one: the lease on {held[0]} ended"]
    monkeypatch.setattr(loop, "_tell_lost_at", 0.0)
    loop.forget({held[3]})
    told = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert told[1:] == [f"rollout: 3 rows lost, the last one: the lease on {held[3]} ended"]
    assert loop.stats.lost == 4
    working.cancel()
    await asyncio.wait([working])


async def test_a_row_that_a_handler_fails_on_fails_no_other_of_its_call(queue: Shut) -> None:
    """Each failure of theirs is an attempt less, and after the last they would be dead letters, too."""

    async def handle(rows: Sequence[LeasedRow]) -> list[RowWrite]:
        if any(row.uid.task == "t1" for row in rows):
            raise UserError("row 1 has no tokens")
        return [rollout_of(row, VERSION) for row in rows]

    queue.accepts.set()
    loop = worker_of(queue, handle, limit=ROWS, per_call=ROWS)
    running = asyncio.create_task(loop.run())
    letters = await answered(lambda: queue.dead_letters("run"))
    loop.drain()
    await running
    assert [letter.uid.task for letter in letters] == ["t1"]
    assert loop.stats.written == ROWS - 1
    assert loop.stats.failed == spec().max_attempts


async def test_rows_that_are_damaged_fail_and_the_others_are_worked_on(queue: Shut) -> None:
    """As where another process wrote over memory that it shares with the queue."""
    worked: set[str] = set()
    lease = queue.lease

    async def damaging(*arguments: Any, **named: Any) -> Lease:
        leased = await lease(*arguments, **named)
        first, *others = leased.blocks
        frame = b"no" + pack([{"tokens": np.arange(3, dtype=np.int32)}])[2:]
        damaged = replace(first, frames=(Frame(frame),))
        return replace(leased, blocks=(damaged, *others))

    async def handle(rows: Sequence[LeasedRow]) -> list[RowWrite]:
        worked.update(row.uid.task for row in rows)
        return [rollout_of(row, VERSION) for row in rows]

    queue.lease = damaging  # type: ignore[method-assign]
    queue.accepts.set()
    loop = worker_of(queue, handle, limit=ROWS)
    running = asyncio.create_task(loop.run())
    await until(lambda: len(worked) == ROWS - 1 and loop.stats.failed > 0)
    letters = await answered(lambda: queue.dead_letters("run"))
    assert not running.done()
    assert "damaged" in letters[0].reason and letters[0].uid.task not in worked
    loop.drain()
    await running
