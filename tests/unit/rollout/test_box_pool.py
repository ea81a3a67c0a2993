"""The pool of a worker's boxes: places, images that are made once, warm boxes, and what is left at the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from meshrl.contract.errors import UnavailableError
from meshrl.rollout.config import ContainersConfig
from meshrl.rollout.containers import pool as pools
from meshrl.rollout.containers.box import BoxLimits, Image, ImageError
from meshrl.rollout.containers.pool import Pool
from tests.doubles.boxes import StandInBackend

IMAGE, OTHER = Image(name="one"), Image(name="two")


def pool_of(backend: StandInBackend, **options: Any) -> Pool:
    return Pool(backend, ContainersConfig(**options))


@pytest.fixture
async def backend() -> AsyncIterator[StandInBackend]:
    made = StandInBackend()
    yield made
    assert not made.open, "a box is left"


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def hold(pool: Pool, image: Image, name: str, until: asyncio.Event) -> str:
    async with pool.box(image, row=name) as box:
        await until.wait()
        return box.name


async def test_so_many_boxes_run_at_once_and_each_row_has_its_own(backend: StandInBackend) -> None:
    pool, go = pool_of(backend, boxes=3, starts=2), asyncio.Event()
    rows = [asyncio.create_task(hold(pool, IMAGE, f"row{n}", go)) for n in range(10)]
    await settle()
    assert (len(backend.open), pool.running) == (3, 3)
    go.set()
    assert len(set(await asyncio.gather(*rows))) == 10
    assert (backend.most_open, backend.most_starts) == (3, 2)
    assert backend.made == [IMAGE]
    await pool.close()


async def test_an_image_is_made_once_while_rows_of_others_run(backend: StandInBackend) -> None:
    woken: list[int] = []
    pool, go = pool_of(backend, boxes=2, starts=4), asyncio.Event()
    await pool._made(OTHER)
    pool.wake = lambda: woken.append(pool.most_rows)
    backend.gate.clear()
    slow = [asyncio.create_task(hold(pool, IMAGE, f"row{n}", go)) for n in range(2)]
    await settle()
    assert woken == [3, 4]  # rows that wait for an image take no place
    assert pool.waits_for.startswith("the image one, in the making for 0 s (2 of its rows)")
    backend.gate.set()
    go.set()
    await asyncio.gather(*slow, hold(pool, OTHER, "row", go))
    assert (pool.most_rows, pool.waits_for, backend.made) == (2, "", [OTHER, IMAGE])
    await pool.close()


async def test_a_row_that_leaves_while_its_image_is_made_disturbs_nobody(
    backend: StandInBackend,
) -> None:
    pool, go = pool_of(backend), asyncio.Event()
    go.set()
    backend.gate.clear()
    first, second = (asyncio.create_task(hold(pool, IMAGE, name, go)) for name in "ab")
    await settle()
    first.cancel()
    await settle()
    backend.gate.set()
    assert await second == "box-1"
    assert first.cancelled() and backend.made == [IMAGE]
    await pool.close()


async def test_a_broken_image_fails_its_rows_at_once_and_is_tried_again_later(
    backend: StandInBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = pool_of(backend)
    backend.broken[IMAGE] = ImageError("one: step 3 of 4: make: *** [all] Error 2")
    for _ in range(3):
        with pytest.raises(ImageError, match="Error 2"):
            async with pool.box(IMAGE, row="row"):
                pass
    assert (backend.made, pool.stats.failed) == ([IMAGE], 1)
    monkeypatch.setattr(pools, "TRY_AGAIN_S", 0.0)
    backend.broken.clear()
    async with pool.box(IMAGE, row="row"):
        pass
    assert backend.made == [IMAGE, IMAGE]
    await pool.close()


async def test_an_engine_that_was_away_is_asked_again(backend: StandInBackend) -> None:
    pool = pool_of(backend)
    backend.broken[IMAGE] = UnavailableError("the engine does not answer")
    with pytest.raises(UnavailableError):
        async with pool.box(IMAGE, row="row"):
            pass
    backend.broken.clear()
    async with pool.box(IMAGE, row="row"):
        pass
    await pool.close()


async def test_warm_boxes_wait_for_the_next_row_of_the_image(backend: StandInBackend) -> None:
    pool = pool_of(backend, boxes=4, warm=1)
    async with pool.box(IMAGE, row="a"):
        await settle()
        assert (len(backend.open), pool.running) == (2, 1)
    async with pool.box(IMAGE, row="b") as box:
        assert box.name == "box-2"
        await settle()
    assert (pool.stats.warm, pool.stats.started) == (1, 3)
    await pool.close()


async def test_warm_boxes_never_take_a_place_from_a_row(backend: StandInBackend) -> None:
    pool, go = pool_of(backend, boxes=3, warm=2), asyncio.Event()
    first = asyncio.create_task(hold(pool, IMAGE, "a", go))
    await settle()
    assert len(backend.open) == 3
    others = [asyncio.create_task(hold(pool, OTHER, f"row{n}", go)) for n in range(2)]
    await settle()
    assert (pool.running, len(backend.open)) == (3, 3)
    go.set()
    await asyncio.gather(first, *others)
    await pool.close()


async def test_an_old_warm_box_is_replaced(
    backend: StandInBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_of(backend, boxes=4, warm=1)
    async with pool.box(IMAGE, row="a"):
        await settle()
    monkeypatch.setattr(pools, "FRESH_S", -1.0)
    async with pool.box(IMAGE, row="b") as box:
        assert box.name == "box-3"
    await pool.close()


async def test_other_limits_want_another_box(backend: StandInBackend) -> None:
    pool = pool_of(backend, boxes=4, warm=1)
    async with pool.box(IMAGE, row="a"):
        await settle()
    async with pool.box(IMAGE, row="b", limits=BoxLimits(cpus=2.0)):
        assert pool.stats.warm == 0
    await pool.close()


async def test_a_thousand_rows_that_are_cancelled_anywhere_leave_nothing() -> None:
    drawn = random.Random(7)
    backend = StandInBackend()
    pool, done = pool_of(backend, boxes=7, warm=2, starts=3), asyncio.Event()
    done.set()
    images = [Image(name=str(n)) for n in range(5)]
    backend.broken[images[0]] = ImageError("broken")

    async def row(number: int) -> None:
        for _ in range(drawn.randrange(20)):
            await asyncio.sleep(0)
        async with pool.box(drawn.choice(images), row=str(number)):
            for _ in range(drawn.randrange(5)):
                await asyncio.sleep(0)

    rows = []
    for number in range(1000):
        rows.append(asyncio.create_task(row(number)))
        if drawn.random() < 0.4:
            rows[-1 - drawn.randrange(min(20, len(rows)))].cancel()
        await asyncio.sleep(0)
    ended = await asyncio.gather(*rows, return_exceptions=True)
    await pool.close()
    assert (pool.running, backend.open, pool._places._value) == (0, set(), 7)
    assert sum(isinstance(each, asyncio.CancelledError) for each in ended) > 100
    assert sum(each is None for each in ended) > 100


async def test_an_engine_that_removes_nothing_holds_nobody_up(
    backend: StandInBackend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(pools, "CLOSE_S", 0.0)
    pool = pool_of(backend)
    async with pool.box(IMAGE, row="a") as box:
        closed = box.close
        box.close = asyncio.Event().wait  # type: ignore[method-assign,assignment]
    assert "could not be removed" in caplog.text
    await closed()
    await pool.close()


async def test_the_sweep_of_a_start_is_told(
    backend: StandInBackend, caplog: pytest.LogCaptureFixture
) -> None:
    await pool_of(backend).start()
    assert "3 boxes of workers that are no more were removed" in caplog.text
