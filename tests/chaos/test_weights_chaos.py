"""A fleet of real processes that stops as a whole, and one with a poisoned engine; `weights_points` has the kills."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .weights_mesh import Mesh


@pytest.fixture
async def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(tmp_path, request.param)
    yield mesh
    await mesh.end()


@pytest.mark.parametrize("mesh", ["gloo"], indirect=True)
async def test_the_trainer_goes_on_while_its_whole_fleet_is_stopped(mesh: Mesh) -> None:
    """Its deadlines are of a minute: no replica is given up before the fourth version is handed over."""
    trainer = await mesh.trainer()
    replicas = [await mesh.replica("one"), await mesh.replica("two")]
    await trainer.until(lambda: len(trainer.fleet) == 2)
    for step in range(2):
        await trainer.publish(step)
        await trainer.until(lambda step=step: f"1.{step}" in trainer.all("published"))
    # No bucket passes a stopped replica, so the one that stops in the middle of a transfer is the first.
    pid = replicas[0].child.pid
    await trainer.publish(2, pid=pid, signal=signal.SIGSTOP, at=1, call=1)
    await replicas[0].stopped()
    replicas[1].signal(signal.SIGSTOP)
    await replicas[1].stopped()
    for step in (3, 4, 5):
        await trainer.publish(step)
    await trainer.until(lambda: "1.5" in trainer.all("carrying"))
    assert trainer.all("published") == ["1.0", "1.1"]
    assert "out" not in [state for state, _ in trainer.fleet.values()]
    for replica in replicas:
        replica.signal(signal.SIGCONT)
    await trainer.until(lambda: trainer.all("published")[-1] == "1.5")
    for replica in replicas:
        await replica.until(lambda replica=replica: "1.5" in replica.all("commit"))
        assert replica.hashes("commit")["1.5"] == trainer.hashes("carrying")["1.5"]


@pytest.mark.parametrize("mesh", ["shm"], indirect=True)
async def test_a_poisoned_engine_ends_its_process_and_the_next_one_joins_at_the_newest_version(
    mesh: Mesh,
) -> None:
    trainer = await mesh.trainer()
    healthy, ill = await mesh.replica("healthy"), await mesh.replica("ill", "--poison=1")
    await trainer.until(lambda: len(trainer.fleet) == 2)
    for step in range(2):
        await trainer.publish(step)
        await trainer.until(lambda step=step: f"1.{step}" in trainer.all("published"))
    assert await ill.child.wait() == 1
    await trainer.until(lambda: trainer.fleet["ill"] == ["out", "1.0"])
    restarted = await mesh.replica("ill")
    await trainer.until(lambda: trainer.fleet["ill"] == ["serving", "1.1"])
    assert restarted.hashes("commit")["1.1"] == healthy.hashes("commit")["1.1"]
