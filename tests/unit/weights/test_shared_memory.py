"""The probe file that shows whether two processes share one memory folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.contract.errors import CapacityError, UserError
from meshrl.weights.carrier import Link
from meshrl.weights.carriers.shm import ShmReader
from meshrl.weights.shared_memory import FOLDER, Offer, Probe, SharedMemory, boot_id


def test_a_probe_is_reachable_only_in_the_same_folder_under_the_same_kernel(tmp_path: Path) -> None:
    host = SharedMemory()
    probe = Probe(host)
    offer = probe.offer
    assert offer.is_reachable(host)
    assert not offer.is_reachable(SharedMemory(tmp_path))
    assert not Offer("another boot", offer.name).is_reachable(host)
    assert not Offer(offer.boot_id, f"meshrl-{'0' * 16}.arena").is_reachable(host)
    probe.close()
    probe.close()
    assert not offer.is_reachable(host)


@pytest.mark.parametrize("name", ["../etc/passwd", "meshrl-x.arena", "/dev/shm/x", ""])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="not the name of a probe file"):
        Offer(boot_id(), name).is_reachable(SharedMemory())


def test_only_files_without_a_living_owner_are_swept(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path)
    probe = Probe(memory)
    (tmp_path / "meshrl-0123456789abcdef.arena").write_bytes(b"left by a dead process")
    assert memory.sweep("meshrl-*.arena") == ["meshrl-0123456789abcdef.arena"]
    assert names(tmp_path) == [probe.offer.name]
    probe.close()


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_a_replica_deletes_the_probe_of_a_dead_trainer(tmp_path: Path) -> None:
    """Its successor may have nothing to train, and then makes no probe of its own."""
    memory = SharedMemory(tmp_path)
    alive = Probe(memory)
    (tmp_path / "meshrl-0123456789abcdef.arena").write_bytes(b"\0")
    await ShmReader(Link(run="run", epoch=1, generation=1, endpoint="", rank=1), memory).close()
    assert names(tmp_path) == [alive.offer.name]
    alive.close()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"no shared memory in .*nowhere"):
        Probe(SharedMemory(tmp_path / "nowhere"))
    assert FOLDER.is_dir()
