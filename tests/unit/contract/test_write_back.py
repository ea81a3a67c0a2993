"""Results of several calls go to the queue together, and each caller hears of its own rows alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from meshrl.contract.errors import FencedError, UnavailableError, UserError
from meshrl.contract.held_rows import Refusal, WriteBack
from meshrl.contract.types import LeasedRow, RowBlock, RowWrite, Uid, Version
from meshrl.testing.contract.queue_actors import Actors, rollout_of, spec, tasks
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

ROWS = 6
VERSION = Version(1, 0)


class Watched(TransferQueue):
    """Remembers how many rows came in each write, and lets none through while its gate is shut."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun = asyncio.Event()
        self.sizes: list[int] = []

    async def write(self, run: str, stage: str, blocks: Sequence[RowBlock]) -> None:
        self.sizes.append(sum(len(block) for block in blocks))
        self.begun.set()
        await self.gate.wait()
        await super().write(run, stage, blocks)


@pytest.fixture
async def queue() -> AsyncIterator[Watched]:
    made = await Watched.open(MemoryStore())
    yield made
    await made.close()


async def leased(queue: TransferQueue) -> list[LeasedRow]:
    """Rows of a run that is opened for them, to be sampled."""
    actors = Actors(queue)
    await actors.start(spec(group_size=1, batch_groups=ROWS))
    await actors.feed(tasks(ROWS, group_size=1))
    lease = await actors.lease(limit=ROWS)
    return list(lease.rows)


class Back:
    """A WriteBack of the sampling stage, and calls that bring it a row each."""

    def __init__(self, queue: TransferQueue, *, alone: bool = False, **limits: Any) -> None:
        self.alone = alone
        self._write_back = WriteBack(queue, "run", "rollout", alone=lambda: self.alone, **limits)

    def bring(
        self, row: LeasedRow, *, token: int | None = None, written: RowWrite | None = None
    ) -> asyncio.Task[dict[Uid, Refusal]]:
        tokens = {row.uid: row.token if token is None else token}
        write = self._write_back.write(tokens, [written or rollout_of(row, VERSION)])
        return asyncio.create_task(write)


async def test_results_that_come_while_a_write_is_in_flight_share_the_next(queue: Watched) -> None:
    rows = await leased(queue)
    back = Back(queue)
    queue.gate.clear()
    first = back.bring(rows[0])
    await queue.begun.wait()
    others = [back.bring(row) for row in rows[1:]]
    queue.gate.set()
    assert await asyncio.gather(first, *others) == [{}] * ROWS
    assert queue.sizes == [1, ROWS - 1]
    reward = await queue.lease(["run"], "reward", worker="j", limit=ROWS, wait_s=5)
    assert {row.uid for row in reward.rows} == {row.uid for row in rows}


async def test_a_result_waits_for_company_until_nobody_is_at_work(queue: Watched) -> None:
    rows = await leased(queue)
    back = Back(queue, gather_s=3600.0)
    assert await back.bring(rows[0]) == {}
    waiting = [back.bring(row) for row in rows[1:-1]]
    await asyncio.sleep(0)
    assert queue.sizes == [1]
    back.alone = True
    await asyncio.gather(back.bring(rows[-1]), *waiting)
    assert queue.sizes == [1, ROWS - 1]


async def test_a_full_write_waits_for_nobody(queue: Watched) -> None:
    rows = await leased(queue)
    back = Back(queue, gather_s=3600.0, most_rows=2)
    await back.bring(rows[0])
    await asyncio.gather(*(back.bring(row) for row in rows[1:5]))
    assert queue.sizes == [1, 2, 2]


async def test_a_row_that_the_queue_refuses_costs_its_company_nothing(queue: Watched) -> None:
    rows = await leased(queue)
    back = Back(queue)
    fenced = back.bring(rows[0], token=rows[0].token + 1)
    defect = back.bring(rows[1], written=RowWrite(uid=rows[1].uid, columns={}))
    others = [back.bring(row) for row in rows[2:]]
    assert isinstance((await fenced)[rows[0].uid], FencedError)
    assert isinstance((await defect)[rows[1].uid], UserError)
    assert await asyncio.gather(*others) == [{}] * (ROWS - 2)
    reward = await queue.lease(["run"], "reward", worker="j", limit=ROWS, wait_s=5)
    assert {row.uid for row in reward.rows} == {row.uid for row in rows[2:]}


async def test_who_is_cancelled_while_it_writes_for_others_leaves_it_to_the_next(
    queue: Watched,
) -> None:
    rows = await leased(queue)
    back = Back(queue, alone=True)
    queue.gate.clear()
    first = back.bring(rows[0])
    second = back.bring(rows[1])
    await queue.begun.wait()
    third = back.bring(rows[2])
    await asyncio.sleep(0)
    first.cancel()
    queue.gate.set()
    assert await asyncio.gather(second, third) == [{}, {}]
    assert first.cancelled()
    reward = await queue.lease(["run"], "reward", worker="j", limit=ROWS, wait_s=5)
    assert {row.uid for row in reward.rows} == {rows[1].uid, rows[2].uid}


async def test_every_call_reports_a_queue_that_is_gone(queue: Watched) -> None:
    rows = await leased(queue)
    back = Back(queue)
    await queue.close()
    found = await asyncio.gather(*map(back.bring, rows), return_exceptions=True)
    assert [type(error) for error in found] == [UnavailableError] * ROWS


class Refusing:
    """A queue that refuses one row, and names another one that nobody wrote."""

    def __init__(self, bad: Uid) -> None:
        self.bad = bad
        self.taken: list[Uid] = []

    async def write_rows(
        self, run: str, stage: str, token_of: Mapping[Uid, int], rows: Sequence[RowWrite]
    ) -> None:
        if any(row.uid == self.bad for row in rows):
            raise UserError("column reward holds nan", uid="run/somewhere else/0.0")
        self.taken += [row.uid for row in rows]


async def test_a_refusal_that_names_a_foreign_row_is_the_row_that_is_refused_alone() -> None:
    uids = [Uid("run", f"t{number}", 0) for number in range(4)]
    queue = Refusing(uids[2])
    back = WriteBack(queue, "run", "reward", alone=lambda: True)
    refused = await back.write(dict.fromkeys(uids, 1), [RowWrite(uid=u, columns={}) for u in uids])
    assert list(refused) == [uids[2]]
    assert queue.taken == [uids[0], uids[1], uids[3]]


async def test_a_call_that_is_cancelled_while_another_writes_for_it_fails_nobody(
    queue: Watched,
) -> None:
    rows = await leased(queue)
    back = Back(queue)
    queue.gate.clear()
    first = back.bring(rows[0])
    await queue.begun.wait()
    queue.begun.clear()
    writer, cancelled = back.bring(rows[1]), back.bring(rows[2])
    await asyncio.sleep(0)
    queue.gate.set()
    await asyncio.sleep(0)
    queue.gate.clear()
    assert await first == {}
    await queue.begun.wait()  # the second writes for the third too
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    queue.gate.set()
    assert await writer == {}
    assert queue.sizes == [1, 2]
