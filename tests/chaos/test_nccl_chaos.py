"""NCCL processes that are killed and stopped at every point, on the stub library; real processes and signals."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.doubles import nccl

from ..waiting import gone
from .weights_mesh import Mesh, Process

POINTS = [{"at": "join"}, {"at": "middle", "nth": 2}, {"at": "between", "nth": 3}]
REPLICAS = ["one", "two", "three"]
"""Ranks 1 to 3 of one communicator."""
IDLE = 3
"""Versions without a fault after which each replica must have a communicator of its own."""


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(tmp_path, "nccl", base_s=1.0)
    yield mesh
    await mesh.end()


def set_up(mesh: Mesh, **stub: object) -> None:
    mesh.config["nccl"] = nccl.settings(**stub)


def children(process: Process) -> list[int]:
    pid = process.child.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_every_death_of_a_nccl_process_costs_a_generation_and_no_version(
    mesh: Mesh, tmp_path: Path
) -> None:
    faults = [
        {**point, "do": deed, "rank": rank, "once": str(tmp_path / f"{point['at']}-{deed}-{rank}")}
        for rank, point, deed in itertools.product(
            (0, 2), POINTS, ("kill", "stop")
        )  # 2: the middle
    ]
    set_up(mesh, deaf=True, faults=faults)
    trainer = await mesh.trainer()
    replicas = [await mesh.replica(name) for name in REPLICAS]
    await trainer.until(lambda: len(trainer.fleet) == len(REPLICAS))
    names = [*REPLICAS]
    struck = [Path(fault["once"]) for fault in faults]
    step = idle = before = 0
    while not all(path.exists() for path in struck):
        await trainer.publish(step)
        version = f"1.{step}"
        everybody = {name: ["serving", version] for name in names}
        # Whoever is struck fails within its deadline, is out, and comes back to what was committed.
        await trainer.until(lambda: trainer.fleet == everybody)  # noqa: B023
        step += 1
        now = sum(path.exists() for path in struck)
        idle, before = (idle + 1 if now == before else 0), now
        if idle == IDLE:
            # Pauses of a busy machine were too many failures of this group: it is not formed again, another one is.
            idle = 0
            names.append(f"more {step}")
            replicas.append(await mesh.replica(names[-1]))
            await trainer.until(lambda: names[-1] in trainer.fleet)
    for process, name in zip(replicas, names, strict=True):
        # Joined again after each failure, never started anew.
        assert process.child.returncode is None, name
        expected = {
            v: h for v, h in trainer.hashes("carrying").items() if v in process.all("commit")
        }
        assert process.hashes("commit") == expected
        assert process.all("commit")[-1] == version
    # A stopped process is killed by its parent: none is left to wake up one day.
    await gone(*(int(path.read_text()) for path in struck))


async def test_a_nccl_process_dies_with_its_parent_and_the_other_end_lets_go(mesh: Mesh) -> None:
    set_up(mesh, deaf=True)
    trainer = await mesh.trainer()
    victim, witness = await mesh.replica("victim"), await mesh.replica("witness")
    await trainer.until(lambda: len(trainer.fleet) == 2)
    await trainer.publish(0)
    await trainer.until(
        lambda: all(state == ["serving", "1.0"] for state in trainer.fleet.values())
    )
    of_the_victim, of_the_trainer = children(victim), children(trainer)
    assert of_the_victim and len(of_the_trainer) >= 2
    victim.signal(signal.SIGKILL)
    await gone(*of_the_victim)
    await trainer.publish(1)
    await witness.until(lambda: "1.1" in witness.all("commit"))
    await trainer.until(lambda: trainer.fleet["victim"][0] == "out")
    of_the_trainer = children(trainer)
    trainer.signal(signal.SIGKILL)
    await gone(*of_the_trainer)
    os.kill(witness.child.pid, 0)
