"""Device memory lent between real processes: of a GPU where there is one, of the stub everywhere."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .weights_mesh import Mesh, Process

GPU = importlib.util.find_spec("cupy") is not None and Path("/dev/nvidiactl").exists()
REAL = pytest.param(
    "cupy",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="wants cupy and an NVIDIA GPU")],
)


@pytest.fixture(params=["tests.doubles.device", REAL])
async def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(tmp_path, "cuda_ipc", ipc={"library": request.param})
    yield mesh
    await mesh.end()


async def test_versions_pass_through_lent_device_memory_whoever_is_killed(mesh: Mesh) -> None:
    trainer = await mesh.trainer()
    survivor, victim = await mesh.replica("survivor"), await mesh.replica("victim")
    await trainer.until(lambda: len(trainer.fleet) == 2)
    for step in range(3):
        await trainer.publish(step)
    await trainer.until(lambda: "1.2" in trainer.all("published"))
    await trainer.publish(3, pid=victim.child.pid, signal=signal.SIGKILL, at=2)
    await trainer.until(lambda: "1.3" in trainer.all("published"))
    await mesh.replica("victim")
    await trainer.until(lambda: trainer.fleet["victim"] == ["serving", "1.3"])
    await survivor.until(lambda: "1.3" in survivor.all("commit"))
    assert survivor.hashes("commit") == trainer.hashes("carrying")
    lent = device_memory(trainer)
    await trainer.publish(4, pid=trainer.child.pid, signal=signal.SIGKILL, at=1)
    await trainer.child.wait()
    resumed = await mesh.trainer(epoch=2)
    await resumed.publish(3)
    await resumed.until(lambda: "2.3" in resumed.all("published"))
    await survivor.until(lambda: "2.3" in survivor.all("commit"))
    assert survivor.hashes("commit")["2.3"] == resumed.hashes("carrying")["2.3"]
    assert [path for path in lent if path.exists()] == []


def device_memory(process: Process) -> set[Path]:
    """Files that stand for device memory which a process lends."""
    links = Path(f"/proc/{process.child.pid}/fd").iterdir()
    return {path for path in map(Path.readlink, links) if path.suffix == ".device"}
