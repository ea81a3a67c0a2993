"""Trainer and engine take turns on one device in virtual time, and are killed: it never holds both, and continues.

Only locks are real: files. The memory of the device is a sum that must not exceed what there is.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest
import torch
from torch import nn

from meshrl.common import device_lease
from meshrl.common.device_lease import DeviceLease
from meshrl.contract.errors import InfraError, WaitTimeoutError
from meshrl.contract.types import OnUpdate, Version
from meshrl.rollout.time_slices import PATIENCE_S, SleepingEngine, TimeSlicedEngine
from meshrl.trainer.learner.learner import Learner
from meshrl.trainer.loop.time_slices import TimeSlices
from tests.simulation.loop import Process, SimulatedLoop, spawn

from ..virtual_time import in_virtual_time, virtual_time

STEPS = 8


@pytest.fixture(autouse=True)
def _looks_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_lease, "POLL_S", 0.5)


class Device:
    """Room for one of them."""

    def __init__(self) -> None:
        self.owner: object | None = None

    def take(self, owner: object) -> None:
        assert self.owner in (None, owner), f"{owner} needs what {self.owner} has: out of memory"
        self.owner = owner

    def free(self, owner: object) -> None:
        if self.owner is owner:
            self.owner = None


class Engine:
    """A sleeper."""

    def __init__(self, device: Device, draw: random.Random) -> None:
        self.asleep = False
        self.served = Version(0, 0)
        self.stuck = False
        self._device = device
        self._draw = draw

    def stats(self) -> Any:
        return SimpleNamespace(running=self._draw.randrange(2))

    async def start(self) -> None:
        self._device.take(self)
        await self._takes(5)

    async def sleep(self) -> None:
        await self._takes(2)
        if self.stuck:
            raise InfraError("it does not sleep")
        self.asleep = True
        self._device.free(self)

    async def wake(self) -> None:
        if self.served.step:
            self._device.take(self)
            await self._takes(2)
            self.asleep = False

    async def commit_weights(self, version: Version, on_update: OnUpdate) -> None:
        self._device.take(self)
        await self._takes(2)
        assert version >= self.served
        self.served, self.asleep = version, False

    async def _takes(self, most_s: float) -> None:
        await asyncio.sleep(self._draw.uniform(0, most_s))


class Model(nn.Module):
    """Takes the device's memory while it is there."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._device = device
        device.take(self)

    def to(self, device: torch.device) -> Self:  # type: ignore[override]
        (self._device.take if device.type == "cpu" and self.offloaded else self._device.free)(self)
        self.offloaded = not self.offloaded
        return self

    offloaded = False


class Here:
    """Runs what a compute thread would."""

    async def run(self, work: Callable[[], Any]) -> Any:
        await asyncio.sleep(0.1)
        return work()


class World:
    """A trainer and an engine, started again when they end."""

    def __init__(self, seed: int, loop: SimulatedLoop, path: Path) -> None:
        self.device = Device()
        self.draw = random.Random(seed)
        self.path = path
        self.loop = loop
        self.processes: dict[str, Process] = {}
        self.engine: tuple[Process, Engine, TimeSlicedEngine] | None = None
        self.trained = 0
        self.published = Version(0, 0)
        self.problems: list[str] = []
        self.done = asyncio.Event()

    def lease(self, process: Process, owner: Callable[[], object], dies_s: float) -> DeviceLease:
        """The lease of `process`, and of its server, which outlives it by `dies_s` with its memory."""
        lease = DeviceLease(self.path)

        def gone() -> None:
            self.device.free(owner())
            lease.close()

        process.on_death[lambda: self.loop.call_later(dies_s, gone)] = None
        return lease

    async def sample(self, process: Process) -> None:
        engine = Engine(self.device, self.draw)
        lease = self.lease(process, lambda: engine, self.draw.choice([0.0, 5.0]))
        slices = TimeSlicedEngine(cast(SleepingEngine, engine), lease, woken=lambda: None)
        await slices.start()
        self.engine = (process, engine, slices)
        turns = asyncio.create_task(slices.run())
        try:
            while not turns.done():
                await asyncio.sleep(0.5)
                if (
                    engine.served < self.published
                ):  # as the weight plane does, now or when it joins again
                    await slices.commit_weights(self.published, self.draw.choice(list(OnUpdate)))
        finally:
            turns.cancel()
            (error,) = await asyncio.gather(turns, return_exceptions=True)
        if isinstance(error, Exception):
            raise error

    async def train(self, process: Process) -> None:
        models: list[Model] = []
        lease = self.lease(process, lambda: models[0] if models else None, 0.0)
        await lease.acquire(900)
        model = Model(self.device)
        models.append(model)
        learner = SimpleNamespace(
            world=SimpleNamespace(device=torch.device("cpu")),
            policy=model,
            optimizers=SimpleNamespace(parts=[], offloaded=False),
            beside={},
        )
        turns = TimeSlices(lease, cast(Learner, learner), cast(Any, Here()), wait_s=900)
        while True:
            self.device.take(model)  # what a step computes is on the device
            await asyncio.sleep(self.draw.uniform(0, 100))
            await turns.release(version_follows=True)
            self.published = Version(1, self.published.step + 1)
            if self.published.step >= STEPS:
                self.done.set()
            while self.engine is None or self.engine[1].served < self.published:  # noqa: ASYNC110
                await asyncio.sleep(0.5)  # for a batch, which only the engine makes
            await turns.acquire()

    async def keep(self, name: str, main: Callable[[Process], Any]) -> None:
        while True:
            process = self.processes[name] = Process(name)
            over = asyncio.Event()
            process.on_death[over.set] = None

            async def live(process: Process = process, over: asyncio.Event = over) -> None:
                try:
                    await main(process)
                except InfraError:
                    pass
                except Exception as error:
                    self.problems.append(repr(error))
                finally:
                    over.set()

            spawn(self.loop, process, live(), name)
            await over.wait()
            process.kill()
            await asyncio.sleep(self.draw.uniform(0, 10))

    async def run(self, faults: int) -> None:
        keeping = [
            asyncio.create_task(self.keep("trainer", self.train)),
            asyncio.create_task(self.keep("engine", self.sample)),
        ]
        for _ in range(faults):
            await asyncio.sleep(self.draw.uniform(0, 120))
            match self.draw.choice(["trainer", "engine", "stuck"]):
                case "stuck" if self.engine is not None:
                    self.engine[1].stuck = True
                case name:
                    if name in self.processes:
                        self.processes[name].kill()
        async with asyncio.timeout(20_000):
            await self.done.wait()
        for task in keeping:
            task.cancel()
        for process in self.processes.values():
            process.kill()
        await asyncio.gather(*keeping, return_exceptions=True)
        await asyncio.sleep(10)


@pytest.mark.parametrize("seed", range(12))
def test_kills_at_any_moment_neither_fill_the_device_twice_nor_stop_the_turns(
    seed: int, tmp_path: Path
) -> None:
    with virtual_time(seed) as loop:
        world = World(seed, loop, tmp_path / "lease")
        loop.run_until_complete(loop.create_task(world.run(faults=seed % 8)))
        assert world.problems == []
    assert world.published.step >= STEPS


@pytest.mark.parametrize("announced", [False, True])
@in_virtual_time
async def test_an_engine_goes_on_with_its_version_when_the_trainer_is_gone(announced: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer, own = (DeviceLease(Path(folder) / "lease") for _ in range(2))
        engine = Engine(Device(), random.Random(1))
        woken: list[float] = []
        clock = asyncio.get_running_loop().time
        slices = TimeSlicedEngine(
            cast(SleepingEngine, engine), own, woken=lambda: woken.append(clock())
        )
        await slices.start()
        await slices.commit_weights(Version(1, 1), OnUpdate.DRAIN)
        running = asyncio.create_task(slices.run())
        await trainer.acquire(10)
        assert engine.asleep
        await asyncio.sleep(10 * PATIENCE_S)  # a long step is no reason to wake
        assert engine.asleep and slices.turns == 1
        gone = clock()
        if announced:  # and killed before it is committed
            trainer.release(version_follows=True)
        trainer.close()
        await asyncio.sleep(PATIENCE_S + 5)
        assert not engine.asleep and engine.served == Version(1, 1)
        assert (PATIENCE_S if announced else 0) <= woken[-1] - gone
        assert woken[-1] - gone <= (PATIENCE_S if announced else 0) + 5
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        own.close()


@in_virtual_time
async def test_a_trainer_that_waits_in_vain_says_so_and_stops_asking() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer, engine = (DeviceLease(Path(folder) / "lease") for _ in range(2))
        await engine.share()
        with pytest.raises(WaitTimeoutError, match="within 900 s"):
            await trainer.acquire(900)
        engine.release()
        await engine.share()  # nobody wants it any more
        for lease in (trainer, engine):
            lease.close()
