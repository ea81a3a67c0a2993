"""The weight plane between real processes that are killed, stopped and started again at the worst moments."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("weights_process.py")
BUCKETS = 4


class Process:
    """A trainer or a replica, with everything that it has reported."""

    def __init__(self, child: asyncio.subprocess.Process, name: str) -> None:
        self.child = child
        self.name = name
        self.events: list[dict[str, Any]] = []
        self._changed = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.child.stdout is not None
        async for line in self.child.stdout:
            async with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()

    async def until(self, condition: Callable[[], Any]) -> Any:
        async with self._changed:
            await self._changed.wait_for(condition)
        return condition()

    def all(self, key: str) -> list[Any]:
        return [event[key] for event in self.events if key in event]

    @property
    def fleet(self) -> dict[str, list[str]]:
        return (self.all("fleet") or [{}])[-1]

    def hashes(self, key: str) -> dict[str, list[str]]:
        return {event[key]: event["hashes"] for event in self.events if key in event}

    async def publish(self, step: int, **trap: int) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps({"publish": step, **trap}).encode() + b"\n")
        await self.child.stdin.drain()

    def signal(self, number: signal.Signals) -> None:
        self.child.send_signal(number)

    async def end(self) -> None:
        if self.child.returncode is None:
            self.child.kill()
        await self.child.wait()
        await self._reading


class Mesh:
    """Starts processes, and sees that none outlives the test."""

    def __init__(self, directory: Path, carrier: str) -> None:
        self.directory = directory
        self.config = {
            "carrier": carrier,
            "base_s": 1.5,
            "ready_s": 3.0,
            "silence_s": 10.0,
            "beat_s": 0.5,
        }
        self.port = 0
        self.started: list[Process] = []

    async def start(self, role: str, *options: str) -> Process:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            str(SCRIPT),
            role,
            f"--config={json.dumps(self.config)}",
            f"--directory={self.directory}",
            f"--port={self.port}",
            *options,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        process = Process(child, role)
        self.started.append(process)
        return process

    async def trainer(self, epoch: int = 1) -> Process:
        trainer = await self.start("trainer", f"--epoch={epoch}")
        self.port = (await trainer.until(lambda: trainer.all("port")))[0]
        return trainer

    async def replica(self, name: str) -> Process:
        return await self.start("replica", f"--name={name}")


@pytest.fixture(params=["gloo", "disk"])
async def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(tmp_path, request.param)
    yield mesh
    for process in mesh.started:
        await process.end()


def at_bucket(mesh: Mesh, index: int) -> dict[str, int]:
    """The trap that springs when bucket `index` is about to be sent; the disk carrier has read it once before."""
    return {"at": index, "call": 2 if mesh.config["carrier"] == "disk" else 1}


async def test_survivors_commit_when_a_receiver_is_killed_at_any_bucket_boundary(
    mesh: Mesh,
) -> None:
    trainer = await mesh.trainer()
    survivor = await mesh.replica("survivor")
    victims = [await mesh.replica(f"victim-{index}") for index in range(BUCKETS)]
    await trainer.until(lambda: len(trainer.fleet) == 1 + BUCKETS)
    await trainer.publish(0)
    await trainer.until(lambda: trainer.all("published") == ["1.0"])
    for index, victim in enumerate(victims):
        trap = at_bucket(mesh, index)
        await trainer.publish(index + 1, pid=victim.child.pid, signal=signal.SIGKILL, **trap)
        await trainer.until(lambda step=index + 1: f"1.{step}" in trainer.all("published"))
        await trainer.until(lambda name=f"victim-{index}": trainer.fleet[name][0] == "out")
    versions = [f"1.{step}" for step in range(BUCKETS + 1)]
    assert trainer.all("published") == versions
    await survivor.until(lambda: survivor.all("commit") == versions)
    assert survivor.hashes("commit") == trainer.hashes("carrying")
    for index, victim in enumerate(victims):
        assert victim.all("commit") == versions[: index + 1]
    replacement = await mesh.replica("victim-0")
    await trainer.until(lambda: trainer.fleet["victim-0"] == ["serving", versions[-1]])
    await replacement.until(lambda: replacement.all("commit") == versions[-1:])


async def test_a_stopped_replica_is_out_and_comes_back_at_the_newest_version(mesh: Mesh) -> None:
    trainer = await mesh.trainer()
    healthy, stopped = await mesh.replica("healthy"), await mesh.replica("stopped")
    await trainer.until(lambda: len(trainer.fleet) == 2)
    await trainer.publish(0)
    await trainer.until(lambda: trainer.all("published") == ["1.0"])
    await trainer.publish(1, pid=stopped.child.pid, signal=signal.SIGSTOP, **at_bucket(mesh, 1))
    await trainer.until(lambda: trainer.all("published") == ["1.0", "1.1"])
    await healthy.until(lambda: healthy.all("commit") == ["1.0", "1.1"])
    await trainer.until(lambda: trainer.fleet["stopped"] == ["out", "1.0"])
    assert any(
        fleet["stopped"][0] == "suspect" for fleet in trainer.all("fleet") if "stopped" in fleet
    )
    await trainer.publish(2)
    await trainer.until(lambda: trainer.all("published")[-1] == "1.2")
    stopped.signal(signal.SIGCONT)
    await trainer.until(lambda: trainer.fleet["stopped"] == ["serving", "1.2"])
    await stopped.until(lambda: stopped.all("commit") == ["1.0", "1.2"])
    assert stopped.hashes("commit")["1.2"] == healthy.hashes("commit")["1.2"]


async def test_replicas_return_to_a_trainer_that_was_killed_and_get_what_it_resumed_from(
    mesh: Mesh,
) -> None:
    trainer = await mesh.trainer()
    replicas = [await mesh.replica("one"), await mesh.replica("two")]
    await trainer.until(lambda: len(trainer.fleet) == 2)
    for step in range(3):
        await trainer.publish(step)
    await trainer.until(lambda: "1.2" in trainer.all("published"))
    # The trainer kills itself in the middle of the transfer of version 3.
    await trainer.publish(3, pid=trainer.child.pid, signal=signal.SIGKILL, **at_bucket(mesh, 2))
    await trainer.child.wait()
    resumed = await mesh.trainer(epoch=2)
    await resumed.publish(1)
    await resumed.until(lambda: resumed.all("published"))
    await resumed.until(
        lambda: resumed.fleet == {"one": ["serving", "2.1"], "two": ["serving", "2.1"]}
    )
    for replica in replicas:
        await replica.until(lambda r=replica: "2.1" in r.all("commit"))
        assert replica.all("commit") == ["1.0", "1.1", "1.2", "2.1"]
        assert replica.hashes("commit")["2.1"] == resumed.hashes("carrying")["2.1"]
