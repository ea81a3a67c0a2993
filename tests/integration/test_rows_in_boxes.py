"""Rows of a rollout worker in boxes: how many are leased, and what closes the box of each."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from types import ModuleType

import pytest

from meshrl.contract.types import Outcome, Task, Uid
from meshrl.rollout import programs
from meshrl.rollout.config import ContainersConfig
from meshrl.rollout.containers.box import Image, ImageError
from meshrl.rollout.containers.pool import Pool
from meshrl.rollout.ports import Generator, Program, Rollout
from meshrl.rollout.programs import ProgramCache, single_turn
from meshrl.rollout.tokenizer import Tokenizer
from meshrl.rollout.worker import RolloutWorker
from meshrl.testing.engines import echo
from meshrl.transferqueue.queue import TransferQueue
from tests.doubles.boxes import StandInBackend

from ..waiting import resident, until
from .test_rollout_worker import (
    EIGHT,
    GROUP,
    RUN,
    Words,
    commit,
    engine,
    open_run,
    tasks,
    until_dead,
    working,
)

__all__ = ["engine"]


def in_boxes(
    monkeypatch: pytest.MonkeyPatch,
    backend: StandInBackend,
    boxes: int,
    *,
    works: Callable[[], Awaitable[None]],
) -> ProgramCache:
    """A program whose rows each hold a box while they work and sample."""
    program = ModuleType("boxed.program")

    def build(options: object, *, gateway: object, boxes: Pool) -> Program:
        async def run(task: Task, uid: Uid, engine: Generator, tokenizer: Tokenizer) -> Rollout:
            async with boxes.box(Image(name=task.task_id), row=str(uid)):
                await works()
                return await single_turn.run(task, uid, engine, tokenizer)

        return run

    program.BOXES, program.build = True, build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, program.__name__, program)
    monkeypatch.setattr(programs, "build_backend", lambda config: backend)
    return ProgramCache(program.__name__, containers=ContainersConfig(boxes=boxes))


async def never() -> None:
    await asyncio.Event().wait()


async def test_no_more_rows_are_leased_than_there_are_boxes(
    queue: TransferQueue, engine: echo.EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await open_run(queue, tasks(5, program="boxed.program"))
    await commit(engine)
    backend, most = StandInBackend(), 0

    async def look() -> None:
        nonlocal most
        most = max(most, worker.held)

    cache = in_boxes(monkeypatch, backend, 3, works=look)
    async with cache:
        await cache.start()
        async with working(queue, engine, programs=cache) as worker:
            await resident(queue, RUN, "ready", 20)
            assert worker.report().boxes == 0
    assert (most <= 6, backend.most_open, backend.open) == (True, 3, set())


async def test_the_box_of_a_row_past_its_deadline_is_closed(
    queue: TransferQueue, engine: echo.EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await open_run(queue, tasks(1, program="boxed.program", deadline_s=0.05), max_attempts=1)
    await commit(engine)
    backend = StandInBackend()
    async with in_boxes(monkeypatch, backend, 8, works=never) as cache:
        await cache.start()
        async with working(queue, engine, programs=cache):
            assert {each.outcome for each in await until_dead(queue)} == {Outcome.TIMEOUT}
            await until(lambda: not backend.open)


async def test_boxes_of_rows_that_a_drain_gives_back_are_closed(
    queue: TransferQueue, engine: echo.EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await open_run(queue, tasks(1, program="boxed.program"))
    await commit(engine)
    backend = StandInBackend()
    async with in_boxes(monkeypatch, backend, 8, works=never) as cache:
        await cache.start()
        worker = RolloutWorker(
            queue, engine, Words(), runs=[RUN], worker="w0", schedule=EIGHT, programs=cache
        )
        running = asyncio.create_task(worker.run(grace_s=0.0))
        await until(lambda: len(backend.open) == GROUP)
        worker.drain()
        await running
        assert backend.open == set()
        assert (await queue.ledger(RUN)).resident.get("leased", 0) == 0


async def test_the_box_of_a_row_whose_lease_is_lost_is_closed(
    queue: TransferQueue, engine: echo.EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await open_run(queue, tasks(1, program="boxed.program"))
    await commit(engine)
    backend = StandInBackend()
    async with in_boxes(monkeypatch, backend, 8, works=never) as cache:
        await cache.start()
        async with working(queue, engine, programs=cache) as worker:
            await until(lambda: len(backend.open) == GROUP)
            first = set(backend.open)
            worker._loop.forget({Uid(RUN, "t000", index) for index in range(GROUP)})
            await until(lambda: not first & backend.open)


async def test_a_broken_image_dead_letters_its_task_with_the_last_lines(
    queue: TransferQueue, engine: echo.EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await open_run(queue, tasks(2, program="boxed.program"), max_attempts=2)
    await commit(engine)
    backend = StandInBackend()
    backend.broken[Image(name="t000")] = ImageError("t000 cannot be built:\nmake: *** Error 2")
    cache = in_boxes(monkeypatch, backend, 8, works=lambda: asyncio.sleep(0))
    async with cache:
        await cache.start()
        async with working(queue, engine, programs=cache):
            dead = await until_dead(queue)
            assert {each.uid.task for each in dead} == {"t000"}
            assert all("make: *** Error 2" in each.reason for each in dead)
            await resident(queue, RUN, "ready", GROUP)
    assert backend.made.count(Image(name="t000")) == 1
