"""The loop publishes a version when its plan is known, beside the gather, which waits for no engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from meshrl.contract.ports import WeightSource
from meshrl.trainer.loop.loop import Trainer
from meshrl.trainer.loop.time_slices import Always
from meshrl.trainer.ranks.world import Compute

AMPLE_S = 60.0
SOURCE = cast(WeightSource, object())


class Fleet:
    """A publisher that says when it was given a version."""

    def __init__(self) -> None:
        self.given = threading.Event()
        self.cancelled = False
        self.takes_for_ever = False

    async def publish(self, source: WeightSource) -> None:
        assert source is SOURCE
        self.given.set()
        if self.takes_for_ever:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise

    async def drained(self) -> None: ...


def trainer(fleet: Fleet, snapshot: Callable[..., WeightSource], turns: object) -> Trainer:
    """The parts that publishing a version touches."""
    made = object.__new__(Trainer)

    async def keep_ranks_waiting(work: Awaitable[None]) -> None:
        await work

    parts: dict[str, Any] = {
        "_state": SimpleNamespace(epoch=1, step=3),
        "status": SimpleNamespace(phase=lambda phase: nullcontext(), step=3),
        "_settings": SimpleNamespace(
            run="r",
            weight_dtype="bfloat16",
            bucket_bytes=1,
            adapters_only=False,
        ),
        "_learner": SimpleNamespace(policy=None),
        "_world": None,
        "_compute": Compute(torch.device("cpu")),
        "_publisher": fleet,
        "_turns": turns,
        "_source": SimpleNamespace(keep_ranks_waiting=keep_ranks_waiting, giving_up=nullcontext),
        "_context": SimpleNamespace(snapshot=snapshot),
    }
    for name, part in parts.items():
        setattr(made, name, part)
    return made


async def published(fleet: Fleet, snapshot: Callable[..., WeightSource], turns: object) -> None:
    made = trainer(fleet, snapshot, turns)
    try:
        await made._publish()
    finally:
        made._compute.close()


async def test_a_version_is_under_way_before_its_gather_is_over() -> None:
    fleet = Fleet()

    def gather(*_: object, on_plan: Callable[[WeightSource], None], **__: object) -> WeightSource:
        on_plan(SOURCE)
        assert fleet.given.wait(AMPLE_S)  # the loop is free meanwhile
        return SOURCE

    await published(fleet, gather, Always())


async def test_what_cannot_be_planned_is_published_when_it_is_whole() -> None:
    fleet = Fleet()

    def gather(*_: object, **__: object) -> WeightSource:
        assert not fleet.given.is_set()
        return SOURCE

    await published(fleet, gather, Always())
    assert fleet.given.is_set()


async def test_a_gather_that_fails_ends_the_wait_for_the_fleet() -> None:
    fleet = Fleet()
    fleet.takes_for_ever = True

    def gather(*_: object, on_plan: Callable[[WeightSource], None], **__: object) -> WeightSource:
        on_plan(SOURCE)
        assert fleet.given.wait(AMPLE_S)
        raise ValueError("a rank has died")

    with pytest.raises(ValueError, match="a rank has died"):
        await published(fleet, gather, Always())
    await asyncio.sleep(0)
    assert fleet.cancelled


async def test_engines_that_use_the_device_too_get_a_version_when_it_is_whole() -> None:
    fleet = Fleet()
    order: list[str] = []

    class Shared:
        async def acquire(self) -> None: ...

        async def release(self, *, version_follows: bool = False) -> None:
            assert not fleet.given.is_set()
            order.append("released")

    def gather(*_: object, on_plan: Callable[[WeightSource], None], **__: object) -> WeightSource:
        on_plan(SOURCE)
        return SOURCE

    await published(fleet, gather, Shared())
    assert order == ["released"]
    assert fleet.given.is_set()
