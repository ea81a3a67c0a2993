"""A server of callers' models in virtual time: killed at its writes and between, full disks, calls that break.

Callers repeat what they are not told. At the end each request has one answer, that of a server that nobody killed,
and after every kill what is on the disk is sound.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from meshrl.contract.codec import pack_training
from meshrl.contract.errors import (
    CapacityError,
    NotFoundError,
    UnavailableError,
    UserError,
    WaitTimeoutError,
)
from meshrl.contract.types import TrainingRequest
from meshrl.trainer.hosted import MODELS
from meshrl.trainer.hosted.audit import audit
from meshrl.trainer.hosted.host import HostedTraining
from meshrl.trainer.hosted.storage import LOCK
from tests.doubles.hosted import KillingDisk, StandInBench
from tests.simulation.loop import Process, SimulatedLoop, spawn
from tests.unit.trainer.test_hosted_kills import LIMITS, SCRIPT, Answers, checkpoints
from tests.unit.trainer.test_hosted_kills import run as without_kills

from ..virtual_time import virtual_time

KILLS = 12
CALL_S, LATE_S = 30.0, 2.0


class FullDisk(KillingDisk):
    """One that has no room now and then."""

    def __init__(self, at: int, draw: random.Random, on_kill: Callable[[], None]) -> None:
        super().__init__(at, on_kill)
        self._draw = draw

    def append(self, path: Path, at: int, data: bytes) -> None:
        if self._draw.random() < 0.05:
            raise OSError(errno.ENOSPC, "no room")
        super().append(path, at, data)


class Scene:
    """One server after the other on a folder, and callers who find the one that runs."""

    def __init__(self, folder: Path, loop: SimulatedLoop, seed: int) -> None:
        self.folder, self.loop, self.draw = folder, loop, random.Random(seed)
        self.told: Answers = {}
        self.lives = 0
        self._running: tuple[Process, HostedTraining] | None = None

    async def serve(self) -> None:
        """Start a server whenever one has died, at a write or at any time between."""
        while True:
            self.lives += 1
            died = asyncio.Event()
            process = Process(f"server {self.lives}")
            process.on_death[died.set] = None
            last = self.lives > KILLS
            at = 1 << 30 if last else self.draw.randrange(40)
            disk = FullDisk(at, self.draw, process.kill)
            host = HostedTraining(
                self.folder, StandInBench(), disk=disk, limits=LIMITS, clock=self.loop.time
            )
            opening = spawn(self.loop, process, host.open(), "open")
            opening.add_done_callback(lambda done: done.cancelled() or done.exception())
            dying = asyncio.create_task(died.wait())
            await asyncio.wait([opening, dying], return_when=asyncio.FIRST_COMPLETED)
            self._running = None if process.dead else (process, host)
            if not last:
                await asyncio.wait([dying], timeout=self.draw.expovariate(1.0))
                process.kill()
            await dying
            self._running = None
            self._free_lock()
            if (self.folder / MODELS).is_dir():
                assert audit(self.folder).problems == []
            await asyncio.sleep(self.draw.random())

    def _free_lock(self) -> None:
        """As the end of the process does."""
        for link in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):
                if link.readlink() == self.folder / LOCK:
                    os.close(int(link.name))

    async def call(self, make: Callable[[HostedTraining], Awaitable[Any]]) -> Any:
        """Ask until there is an answer; some calls break before they are heard, and some answers are lost."""
        while True:
            await asyncio.sleep(self.draw.random() * LATE_S)
            if self._running is None or self.draw.random() < 0.1:
                continue
            process, host = self._running
            calling = spawn(self.loop, process, _awaited(make(host)), "call")
            await asyncio.wait([calling], timeout=CALL_S)
            lost = process.dead or not calling.done()
            if lost or (calling.exception() is None and self.draw.random() < 0.1):
                continue
            try:
                return calling.result()
            except (UnavailableError, CapacityError, WaitTimeoutError):
                pass

    async def caller(self, model: str) -> None:
        requests = [
            TrainingRequest(model=model, number=number, verb=verb)
            for number, verb in enumerate(SCRIPT[model])
        ]
        await self._submit(requests[0])
        later = [*requests[1:], *self.draw.sample(requests, 5 if len(requests) > 5 else 1)]
        self.draw.shuffle(later)
        await asyncio.gather(*map(self._submit, later))
        for request in requests:
            number = request.number
            answer = await self.call(lambda host, n=number: host.result(model, n, wait_s=5))
            self.told[model, number] = pack_training(answer)

    async def _submit(self, request: TrainingRequest) -> None:
        try:
            await self.call(lambda host: host.submit(request))
        except NotFoundError:
            raise
        except UserError:
            pass  # its number is used up

    async def play(self) -> None:
        serving = asyncio.create_task(self.serve())
        calling = asyncio.gather(*(self.caller(model) for model in SCRIPT))
        await asyncio.wait([serving, calling], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        await calling
        serving.cancel()
        await asyncio.wait([serving])
        self._free_lock()


async def _awaited(what: Awaitable[Any]) -> Any:
    return await what


@pytest.fixture(scope="module")
def wanted() -> Iterator[tuple[Answers, dict[str, bytes]]]:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield without_kills(Path(folder), [])[0], checkpoints(Path(folder))


@pytest.mark.parametrize("seed", range(20))
def test_each_request_is_done_once_whenever_the_server_is_killed(
    seed: int, wanted: tuple[Answers, dict[str, bytes]]
) -> None:
    with TemporaryDirectory(dir="/dev/shm") as folder, virtual_time(seed) as loop:
        loop.set_exception_handler(lambda *_: None)  # of what was killed
        scene = Scene(Path(folder), loop, seed)
        loop.run_until_complete(loop.create_task(scene.play()))
        assert scene.lives > 3
        assert (scene.told, checkpoints(Path(folder))) == wanted
        assert audit(Path(folder)).problems == []
