"""The probe file that shows whether two processes share one memory folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.contract.errors import CapacityError, UserError
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
    assert [path.name for path in tmp_path.iterdir()] == [probe.offer.name]
    probe.close()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"no shared memory in .*nowhere"):
        Probe(SharedMemory(tmp_path / "nowhere"))
    assert FOLDER.is_dir()
