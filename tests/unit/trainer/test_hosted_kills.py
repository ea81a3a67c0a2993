"""Kills at every write of a journal: no request is lost or done twice, and each keeps its first answer."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from meshrl.contract.codec import pack_training
from meshrl.contract.errors import UserError
from meshrl.contract.types import (
    AdamStep,
    CreateModel,
    LoadWeights,
    Pass,
    Refused,
    SaveWeights,
    TrainingRequest,
    TrainingVerb,
    UnloadModel,
)
from meshrl.trainer.hosted.host import HostedTraining, HostingLimits
from tests.doubles.hosted import KillingDisk, StandInBench

LIMITS = HostingLimits(snapshot_steps=2)


def learn(setting: float, *, backward: bool = True, **more: float) -> Pass:
    settings = {"number": setting, **more}
    return Pass(examples=[], loss="ppo", loss_settings=settings, backward=backward)


def step(rate: float) -> AdamStep:
    return AdamStep(learning_rate=rate)


SCRIPT: dict[str, list[TrainingVerb]] = {
    "one": [
        CreateModel(base_model="one", lora_rank=4),
        learn(1),
        learn(2),
        step(0.1),
        SaveWeights(name="a"),
        learn(3, wrong=1),
        learn(4, fails=1),
        learn(4),
        step(0.2),
        step(0.2),
        learn(5),
        step(13),
        learn(5, backward=False),
        learn(5),
        SaveWeights(name="a", for_sampler=True),
        SaveWeights(name="a", overwrite=True),
        step(0.3),
        LoadWeights(path="tinker://one/weights/a", with_optimizer=True),
        learn(6),
        step(0.4),
        SaveWeights(name="a"),
        SaveWeights(name="a", overwrite=True),
        learn(7),
        step(0.5),
        UnloadModel(),
        learn(8),
    ],
    "two": [
        CreateModel(base_model="two", lora_rank=4, lora_seed=3),
        Refused(error="nothing for us"),
        learn(1),
        step(0.1),
        LoadWeights(path="tinker://two/weights/none"),
        learn(2),
        step(0.2),
        learn(3),
        step(0.3),
        learn(4),
        SaveWeights(name="b"),
    ],
    "three": [
        CreateModel(base_model="three", lora_rank=13),
        learn(1),
    ],
}
Answers = dict[tuple[str, int], bytes]


async def client(host: HostedTraining, model: str, told: Answers) -> None:
    """Submit all, some of it early and all of it twice, and ask for each answer."""
    requests = [
        TrainingRequest(model=model, number=number, verb=verb)
        for number, verb in enumerate(SCRIPT[model])
    ]
    await host.submit(requests[0])
    later = [*requests[2:4], requests[1], *requests[4:], *requests]
    outcomes = await asyncio.gather(*map(host.submit, later), return_exceptions=True)
    for outcome in outcomes:
        if outcome is not None and not isinstance(outcome, UserError):
            raise outcome
    for request in requests:
        answer = pack_training(await host.result(model, request.number, wait_s=20))
        assert told.setdefault((model, request.number), answer) == answer, request


async def life(folder: Path, disk: KillingDisk, told: Answers, limits: HostingLimits) -> bool:
    """A process from its start to its end; whether it was not killed."""
    dead = asyncio.Event()
    disk._on_kill = lambda: loop.call_soon_threadsafe(dead.set)  # type: ignore[assignment]
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)  # tasks of a process that was killed
    host = HostedTraining(folder, StandInBench(), disk=disk, limits=limits)

    async def work() -> None:
        await host.open()
        await asyncio.gather(*(client(host, model, told) for model in SCRIPT))
        await host.close()

    working, ended = asyncio.create_task(work()), asyncio.create_task(dead.wait())
    await asyncio.wait([working, ended], return_when=asyncio.FIRST_COMPLETED)
    if not disk.killed:
        await working
        ended.cancel()
        return True
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
        with suppress(asyncio.CancelledError, BaseException):
            await task
    host._thread.shutdown()
    if host._lock >= 0:  # as the end of the process does
        os.close(host._lock)
    return False


def run(
    folder: Path, kills: Sequence[int], limits: HostingLimits = LIMITS, pause_s: float = 0.0
) -> tuple[Answers, int]:
    """Lives that end at these writes, and one to the end: all answers, and how many writes the last one made."""
    logging.getLogger("meshrl.trainer.hosted").setLevel(logging.CRITICAL)
    told: Answers = {}
    for at in kills:
        disk = KillingDisk(at)
        disk.pause_s = pause_s
        asyncio.run(life(folder, disk, told, limits))
    disk = KillingDisk()
    assert asyncio.run(life(folder, disk, told, limits))
    return told, disk.points


def checkpoints(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted((folder / "checkpoints").rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder whose files cost no wait for a disk: the kills are in the test's hands."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_kill_at_any_write_loses_and_repeats_nothing(in_memory: Path, every: int) -> None:
    wanted, writes = run(in_memory / "whole", [])
    assert writes > 100
    assert len(wanted) == sum(map(len, SCRIPT.values()))
    for at in range(0, writes, every):
        folder = in_memory / str(at)
        assert run(folder, [at])[0] == wanted, at
        assert checkpoints(folder) == checkpoints(in_memory / "whole"), at


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 16))]
)
def test_many_kills(tmp_path: Path, seed: int) -> None:
    wanted, writes = run(tmp_path / "whole", [])
    draw = random.Random(seed)
    limits = HostingLimits(
        snapshot_steps=draw.randint(1, 4), snapshot_bytes=draw.choice([1, 2000, 1 << 20])
    )
    kills = [draw.randrange(writes // 3) for _ in range(12)]
    pause_s = draw.choice([0.0, 0.002])  # answers lag behind
    assert run(tmp_path / "killed", kills, limits, pause_s)[0] == wanted
    assert checkpoints(tmp_path / "killed") == checkpoints(tmp_path / "whole")
