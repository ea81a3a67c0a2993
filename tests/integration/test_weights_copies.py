"""How often a version is copied in host memory, counted: from the trainer's bucket to what engines are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.common import shared_buffers
from meshrl.common.shared_buffers import Pin, page_lock
from meshrl.contract.types import Version
from meshrl.weights import shared_memory
from tests.doubles.weights import HashSink

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


class PinnedSink(HashSink):
    """An engine on a device."""

    def __init__(self, status: int = 0) -> None:
        super().__init__()
        self.locked: list[int] = []
        self._status = status

    @property
    def pin(self) -> Pin:
        return page_lock(self)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.locked.append(address)
        return self._status

    def cudaHostUnregister(self, address: int) -> int:
        return 0


async def test_what_an_engine_on_a_device_is_given_is_page_locked_and_locked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_buffers, "_free", [])  # what tests before this one left
    engine = PinnedSink()
    async with opened("gloo", tmp_path) as fleet:
        await fleet.joined(one=engine)
        for step in range(4):
            await fleet.carry(fleet.source(step))
        assert engine.hashes == fleet.source(3).manifest.bucket_hashes
    assert 1 <= len(engine.locked) < 4


async def test_a_replica_whose_memory_cannot_be_locked_is_out_and_the_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_buffers, "_free", [])
    engine, full = PinnedSink(), PinnedSink(status=2)
    async with opened("gloo", tmp_path) as fleet:
        await fleet.joined(one=engine, full=full)
        await fleet.carry(fleet.source(0))
        assert engine.version == Version(1, 0)
        assert full.locked and full.version is None
