"""Carriers that send what changed, between real processes that die where the base of the next patch is at stake."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .weights_mesh import Mesh

SPARSE = {"density": 0.01}


@pytest.fixture(params=["delta", "disk"])
async def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(tmp_path, request.param)
    mesh.config["directory"] = str(tmp_path / "objects")
    yield mesh
    await mesh.end()


async def test_a_trainer_killed_in_a_sparse_transfer_resumes_and_everybody_follows(
    mesh: Mesh,
) -> None:
    trainer = await mesh.trainer()
    replicas = [await mesh.replica("one"), await mesh.replica("two")]
    await trainer.until(lambda: len(trainer.fleet) == 2)
    for step in range(3):
        await trainer.publish(step, **SPARSE)
    await trainer.until(lambda: "1.2" in trainer.all("published"))
    # On its way through delta, on its way to the store through disk: two of its four patches are there.
    signal_at = {"pid": trainer.child.pid, "signal": signal.SIGKILL, "at": 2}
    await trainer.publish(3, **signal_at, **SPARSE)
    await trainer.child.wait()
    resumed = await mesh.trainer(epoch=2)
    for step in range(1, 4):
        await resumed.publish(step, **SPARSE)
    await resumed.until(lambda: "2.3" in resumed.all("published"))
    await resumed.until(
        lambda: resumed.fleet == {"one": ["serving", "2.3"], "two": ["serving", "2.3"]}
    )
    sent = resumed.hashes("carrying")
    for replica in replicas:
        await replica.until(lambda r=replica: "2.3" in r.all("commit"))
        got = replica.hashes("commit")
        assert replica.all("commit")[:3] == ["1.0", "1.1", "1.2"]
        assert "1.3" not in got
        assert {version: got[version] for version in got if version in sent}.items() <= sent.items()
        assert got["2.3"] == sent["2.3"]
    left = sorted(path.name for path in (mesh.directory / "objects").glob("chaos/*"))
    assert left == (["2.1", "2.2", "2.3"] if mesh.config["carrier"] == "disk" else [])


async def test_a_replica_killed_between_prepared_and_committed_comes_back_exact(
    mesh: Mesh,
) -> None:
    point = "received commit"
    trainer = await mesh.trainer()
    healthy = await mesh.replica("healthy")
    victim = await mesh.replica("victim", f"--arm={point},2,{int(signal.SIGKILL)}")
    await trainer.until(lambda: len(trainer.fleet) == 2)
    for step in range(3):
        await trainer.publish(step, **SPARSE)
    await victim.child.wait()
    assert victim.all("signalled") == [point]
    await trainer.until(lambda: "1.2" in trainer.all("published"))
    back = await mesh.replica("victim")
    await trainer.until(lambda: trainer.fleet["victim"] == ["serving", "1.2"])
    for step in (3, 4):
        await trainer.publish(step, **SPARSE)
    await trainer.until(lambda: "1.4" in trainer.all("published"))
    for replica in (healthy, back):
        await replica.until(lambda r=replica: "1.4" in r.all("commit"))
        assert replica.hashes("commit").items() <= trainer.hashes("carrying").items()
    assert back.all("commit") == ["1.2", "1.3", "1.4"]
    assert healthy.all("commit") == [f"1.{step}" for step in range(5)]
