"""The weight plane between real processes that are killed, stopped and started again at the worst moments.

A receiver's end and silence are tried over gloo, whose connections break with it; the simulated mesh tries them, at
every moment, over the carriers that share memory and files.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .weights_mesh import BUCKETS, Mesh

over_gloo = pytest.mark.parametrize("mesh", ["gloo"], indirect=True)


@pytest.fixture(params=["gloo", "disk", "shm"])
async def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(tmp_path, request.param)
    yield mesh
    await mesh.end()


def at_bucket(mesh: Mesh, index: int) -> dict[str, int]:
    """A signal when bucket `index` is about to be sent; disk has read it once before."""
    return {"at": index, "call": 2 if mesh.config["carrier"] == "disk" else 1}


@over_gloo
async def test_survivors_commit_when_a_receiver_is_killed_at_the_first_or_the_last_bucket(
    mesh: Mesh,
) -> None:
    """`test_weights_channels.py` kills at each bucket, in virtual time."""
    buckets = (0, BUCKETS - 1)
    trainer = await mesh.trainer()
    survivor = await mesh.replica("survivor")
    victims = [await mesh.replica(f"victim-{bucket}") for bucket in buckets]
    await trainer.until(lambda: len(trainer.fleet) == 1 + len(victims))
    await trainer.publish(0)
    await trainer.until(lambda: trainer.all("published") == ["1.0"])
    for step, (bucket, victim) in enumerate(zip(buckets, victims, strict=True), start=1):
        signal_at = at_bucket(mesh, bucket)
        await trainer.publish(step, pid=victim.child.pid, signal=signal.SIGKILL, **signal_at)
        await trainer.until(lambda step=step: f"1.{step}" in trainer.all("published"))
        await trainer.until(lambda name=f"victim-{bucket}": trainer.fleet[name][0] == "out")
    versions = ["1.0", "1.1", "1.2"]
    assert trainer.all("published") == versions
    await survivor.until(lambda: survivor.all("commit") == versions)
    assert survivor.hashes("commit") == trainer.hashes("carrying")
    for step, victim in enumerate(victims, start=1):
        assert victim.all("commit") == versions[:step]
    replacement = await mesh.replica("victim-0")
    await trainer.until(lambda: trainer.fleet["victim-0"] == ["serving", versions[-1]])
    await replacement.until(lambda: replacement.all("commit") == versions[-1:])


@over_gloo
async def test_a_stopped_replica_is_out_and_comes_back_at_the_newest_version(mesh: Mesh) -> None:
    mesh.config |= {"base_s": 3.0}  # nothing but a deadline finds it
    trainer = await mesh.trainer()
    healthy, stopped = await mesh.replica("healthy"), await mesh.replica("stopped")
    await trainer.until(lambda: len(trainer.fleet) == 2)
    await trainer.publish(0)
    await trainer.until(lambda: trainer.all("published") == ["1.0"])
    # At the first time that the bucket is read: later it might hold everything, and be silent, not late.
    await trainer.publish(1, pid=stopped.child.pid, signal=signal.SIGSTOP, at=1, call=1)
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


@over_gloo
async def test_the_trainer_goes_on_while_its_whole_fleet_is_stopped(mesh: Mesh) -> None:
    """Its deadlines are of a minute: no replica is given up before the fourth version is handed over."""
    trainer = await mesh.trainer()
    replicas = [await mesh.replica("one"), await mesh.replica("two")]
    await trainer.until(lambda: len(trainer.fleet) == 2)
    for step in range(2):
        await trainer.publish(step)
        await trainer.until(lambda step=step: f"1.{step}" in trainer.all("published"))
    # No bucket goes on past a stopped replica, so the one that stops in the middle of a transfer is the first.
    pid = replicas[0].child.pid
    await trainer.publish(2, pid=pid, signal=signal.SIGSTOP, **at_bucket(mesh, 1))
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


async def test_a_poisoned_engine_ends_its_process_and_the_next_one_joins_at_the_newest_version(
    tmp_path: Path,
) -> None:
    mesh = Mesh(tmp_path, "shm")
    try:
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
    finally:
        await mesh.end()
