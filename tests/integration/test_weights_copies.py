"""How often a version is copied in host memory, counted: from the trainer's bucket to what engines are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.weights import shared_memory

from .weights_fleet import opened


@pytest.mark.parametrize(
    ("carrier", "copies"),
    [
        # Written to /dev/shm, which every replica maps.
        ("shm", lambda replicas: 1),
        # The processes of the ranks map what the snapshot lies in, and what engines get.
        ("nccl", lambda replicas: 0),
        # Sent from where the snapshot lies, received into what the engine gets.
        ("gloo", lambda replicas: 0),
    ],
)
async def test_a_version_is_copied_by_the_trainer_once_however_many_replicas_there_are(
    carrier: str,
    copies: Callable[[int], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[int] = []
    copyto, write = np.copyto, shared_memory.SharedMemory.write

    def counted_copyto(into: Any, content: Any) -> None:
        copied.append(content.nbytes)
        copyto(into, content)

    def counted_write(self: Any, descriptor: int, at: int, content: memoryview) -> None:
        copied.append(content.nbytes)
        write(self, descriptor, at, content)

    monkeypatch.setattr(np, "copyto", counted_copyto)
    monkeypatch.setattr(shared_memory.SharedMemory, "write", counted_write)
    async with opened(carrier, tmp_path) as fleet:
        names = ["one", "two", "three"]
        engines = await fleet.joined(*names)
        await fleet.carry(fleet.source(0))  # opens channels
        copied.clear()
        source = fleet.source(1)
        await fleet.carry(source)
        assert [engine.hashes for engine in engines] == [source.manifest.bucket_hashes] * 3
        whole = source.manifest.total_bytes
        bytes_of_buckets = [n for n in copied if n > 1]  # a lock is a byte
        assert sum(bytes_of_buckets) == copies(len(names)) * whole
