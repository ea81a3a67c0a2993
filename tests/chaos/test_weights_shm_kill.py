"""A killed trainer's files in shared memory, and who removes them."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ..waiting import until
from .weights_mesh import Mesh, Process


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(tmp_path, "shm")
    yield mesh
    await mesh.end()


def held(process: Process) -> set[Path]:
    """Files in shared memory that a process has open."""
    links = Path(f"/proc/{process.child.pid}/fd").iterdir()
    found = {link.readlink() for link in links if link.is_symlink()}
    return {path for path in found if path.parent == Path("/dev/shm")}


def versions(files: set[Path]) -> set[str]:
    """Versions of the weight files among `files`, by the end of their names."""
    return {path.stem.rpartition("-")[2] for path in files if path.suffix == ".weights"}


async def gone(paths: set[Path]) -> None:
    await until(lambda: not any(path.exists() for path in paths))


async def killed_with_versions(mesh: Mesh, epoch: int, replica: bool) -> tuple[Process, set[Path]]:
    trainer = await mesh.trainer(epoch)
    if replica:
        await mesh.replica("one")
        await trainer.until(lambda: "one" in trainer.fleet)
    for step in range(3):
        await trainer.publish(step)
        await trainer.until(lambda step=step: f"{epoch}.{step}" in trainer.hashes("carrying"))
    if replica:
        await trainer.until(lambda: f"{epoch}.2" in trainer.all("published"))
    await until(lambda: versions(held(trainer)) == {f"{epoch}.1", f"{epoch}.2"})  # keep: 2
    files = held(trainer)
    trainer.signal(signal.SIGKILL)
    await trainer.child.wait()
    return trainer, files


async def test_a_replica_unlinks_what_its_killed_trainer_left(mesh: Mesh) -> None:
    _, files = await killed_with_versions(mesh, 1, replica=True)
    await gone({path for path in files if path.suffix == ".weights"})


async def test_the_next_trainer_unlinks_what_a_killed_one_left_and_not_what_a_living_one_holds(
    mesh: Mesh,
) -> None:
    _, files = await killed_with_versions(mesh, 1, replica=False)
    assert all(path.exists() for path in files)
    living = await mesh.trainer(epoch=2)
    await gone(files)
    await living.publish(7)
    await until(lambda: "2.7" in versions(held(living)))
    mesh.port = 0
    await mesh.trainer(epoch=3)
    assert all(path.exists() for path in held(living))
    assert versions(held(living)) == {"2.7"}
