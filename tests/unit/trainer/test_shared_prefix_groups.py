"""Rows of a group are worked on together; no call waits for a row that cannot come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from meshrl.contract.stage_worker import StageResult
from meshrl.contract.types import LeasedRow, RowWrite, Task, Uid
from meshrl.trainer.reference.stage import SharedPrefixGroups

GROUP = 4


def rows(task: str, *indices: int) -> list[LeasedRow]:
    prompt = np.arange(3, dtype=np.int32)
    made = Task(run="run", task_id=task, prompt_ids=prompt, group_size=GROUP)
    return [
        LeasedRow(uid=Uid("run", task, index, 0), token=1, task=made, columns={}, delivery=1)
        for index in indices
    ]


class Bench:
    """Work that remembers what it was given, one piece after the other, and waits at its gate."""

    def __init__(self, *, max_wait_s: float = 3600.0, most_waiting: int = 512) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun = asyncio.Event()
        self.pieces: list[list[str]] = []
        self.groups = SharedPrefixGroups(
            self._work, max_wait_s=max_wait_s, most_waiting=most_waiting
        )

    async def _work(self, given: Sequence[LeasedRow]) -> Sequence[StageResult]:
        self.pieces.append(sorted(f"{row.uid.task}{row.uid.index}" for row in given))
        self.begun.set()
        await self.gate.wait()
        if any(row.uid.task == "bad" for row in given):
            raise RuntimeError("not these")
        return [RowWrite(uid=row.uid, columns={}) for row in reversed(given)]

    def bring(self, *args: object) -> asyncio.Task[Sequence[StageResult]]:
        return asyncio.create_task(self.groups.results(rows(*args)))  # type: ignore[arg-type]


def indices(results: Sequence[StageResult]) -> list[int]:
    return [result.uid.index for result in results]


async def test_rows_wait_for_their_group_and_for_no_other() -> None:
    bench = Bench()
    first, other, second = bench.bring("a", 0, 2), bench.bring("b", 0), bench.bring("a", 1, 3)
    assert indices(await first) == [0, 2]
    assert indices(await second) == [1, 3]
    assert bench.pieces == [["a0", "a1", "a2", "a3"]]
    other.cancel()


async def test_the_last_row_of_a_group_waits_for_nobody() -> None:
    bench = Bench(max_wait_s=0.0)
    assert indices(await bench.bring("a", 0, 1, 2)) == [0, 1, 2]
    bench.groups.max_wait_s = 3600.0
    assert indices(await bench.bring("a", 3)) == [3]
    assert bench.pieces == [["a0", "a1", "a2"], ["a3"]]


async def test_groups_that_are_due_while_others_are_worked_on_share_the_next_piece() -> None:
    bench = Bench()
    bench.gate.clear()
    calls = [bench.bring("a", *range(GROUP))]
    await bench.begun.wait()
    calls += [bench.bring(task, *range(GROUP)) for task in "bc"]
    await asyncio.sleep(0)
    bench.gate.set()
    await asyncio.gather(*calls)
    assert [len(piece) for piece in bench.pieces] == [GROUP, 2 * GROUP]


async def test_the_oldest_waits_no_longer_where_many_do() -> None:
    bench = Bench(most_waiting=2)
    oldest, newer = bench.bring("a", 0), bench.bring("b", 0, 1)
    assert indices(await oldest) == [0]
    assert not newer.done()
    newer.cancel()


async def test_who_fails_or_is_cancelled_leaves_the_others_their_work() -> None:
    bench = Bench()
    bench.gate.clear()
    cancelled = bench.bring("a", *range(GROUP))
    await bench.begun.wait()
    bad, good = bench.bring("bad", *range(GROUP)), bench.bring("c", *range(GROUP))
    await asyncio.sleep(0)
    cancelled.cancel()
    bench.gate.set()
    with pytest.raises(RuntimeError, match="not these"):
        await bad
    assert indices(await good) == list(range(GROUP))
