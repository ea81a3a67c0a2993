"""Weights into memory of a device that an engine has lent to the receiver's process, on the stub of a device."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.contract.errors import UnavailableError
from meshrl.contract.ports import LentBucket
from meshrl.contract.types import Version
from meshrl.weights import transport
from meshrl.weights.carriers.nccl import Lending
from tests.doubles import nccl as double
from tests.doubles.weights import HashSink, LendingHashSink

from ..waiting import until
from .weights_fleet import Fleet, opened


@pytest.fixture
async def engine() -> AsyncIterator[LendingHashSink]:
    engine = LendingHashSink()
    yield engine
    engine.free()


async def serves(fleet: Fleet, step: int, *engines: HashSink) -> None:
    source = fleet.source(step)
    await fleet.carry(source)
    assert [engine.hashes for engine in engines] == [source.manifest.bucket_hashes] * len(engines)


async def test_a_version_arrives_on_the_device_of_one_and_on_the_host_of_another_with_no_copy(
    engine: LendingHashSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    copyto = np.copyto

    def counted(into: Any, content: Any) -> None:
        copied.append(content.nbytes)
        copyto(into, content)

    async with opened("nccl", tmp_path) as fleet:
        other, _ = await fleet.joined("other", lender=engine)
        await serves(fleet, 0, other, engine)
        monkeypatch.setattr(np, "copyto", counted)
        memory = [*engine.lent]
        for step in (1, 2):
            await serves(fleet, step, other, engine)
        late = LendingHashSink()
        try:
            fleet.join("late", late)
            await asyncio.wait_for(_caught_up(late), 30)
            await serves(fleet, 3, other, engine, late)
        finally:
            late.free()
        assert engine.versions == engine.commits == [Version(1, step) for step in range(4)]
        assert [*engine.lent] == memory
        assert copied == []
        assert fleet.moved_bytes()["lender"] == fleet.source(1).manifest.total_bytes


async def _caught_up(engine: LendingHashSink) -> None:
    await until(lambda: engine.commits)


async def test_what_arrives_wrong_on_the_device_is_sent_again(
    engine: LendingHashSink,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = transport.chunk_digest
    wrong = ["0" * 16] * 2  # what is expected, as the one that sends and the one that is told ask

    async def digest(source: Any, index: int) -> str:
        return wrong.pop() if wrong and index == 1 else await made(source, index)

    async with opened("nccl", tmp_path) as fleet:
        await fleet.joined(lender=engine)
        monkeypatch.setattr(transport, "chunk_digest", digest)
        await serves(fleet, 0, engine)
        assert wrong == []
        assert "weights 1.0 arrived damaged: bucket 1, on the device" in caplog.text
        assert engine.versions == [Version(1, 0)]


@pytest.mark.parametrize("what", ["kill", "hang"])
async def test_a_receiver_that_dies_in_a_bucket_leaves_nothing_that_is_served(
    what: str, engine: LendingHashSink, tmp_path: Path
) -> None:
    struck = tmp_path / "struck"
    fault = {"at": "middle", "nth": 2, "do": what, "rank": 1, "once": str(struck)}
    nccl = double.settings(deaf=True, faults=[fault])
    deadlines = {"base_s": 4.0, "silence_s": 30.0}
    async with opened("nccl", tmp_path, nccl=nccl, **deadlines) as fleet:
        other, _ = await fleet.joined("other", lender=engine)
        await serves(fleet, 0, other, engine)
        await serves(fleet, 1, other, engine)
        assert struck.exists()
        assert engine.versions[-1] == Version(1, 1)


async def test_memory_that_the_receiver_cannot_open_is_left_for_the_host(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    class Elsewhere(LendingHashSink):
        """In another container: its handles name nothing here."""

        async def lend(self, manifest: Any, receiver: Any) -> Any:
            for bucket in await super().lend(manifest, receiver):
                self.device.free(self.lent[bucket])
            try:
                await receiver.reach(next(iter(self.lent)))
            except UnavailableError as error:
                self.why = str(error)
            self.lent.clear()
            return ()

    engine = Elsewhere()
    async with opened("nccl", tmp_path) as fleet:
        await fleet.joined(elsewhere=engine)
        await serves(fleet, 0, engine)
        await serves(fleet, 1, engine)
    assert engine.why.startswith("NCCL: opening memory that was lent: invalid handle")
    assert engine.versions == []


def vanish(bucket: LentBucket) -> None:
    Path("/dev/shm", bytes.fromhex(bucket.handle).decode()).unlink()


async def test_memory_that_nothing_can_be_received_into_is_not_used_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Vanishing(LendingHashSink):
        """Its memory can be opened when it is tried, and never afterwards."""

        async def lend(self, manifest: Any, receiver: Any) -> Any:
            self.free()
            lent = await super().lend(manifest, receiver)
            for bucket in lent:
                vanish(bucket)
            return lent

    engine = Vanishing()
    async with opened("nccl", tmp_path, base_s=60.0, silence_s=60.0) as fleet:
        fleet.join("engine", engine)
        source = fleet.source(0)
        await fleet.coordinator.publish(source)
        await until(lambda: engine.hashes == source.manifest.bucket_hashes)
    assert caplog.text.count("from now on versions arrive on the host") == 1
    assert engine.versions == []


async def test_nothing_is_lent_again_before_the_process_that_wrote_there_is_gone(
    engine: LendingHashSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[bool]] = []
    settle = Lending.settle

    async def watched(self: Lending) -> None:
        await settle(self)
        started = self._processes._started
        seen.append([each.ended for each in started if each.killed])

    monkeypatch.setattr(Lending, "settle", watched)
    async with opened("nccl", tmp_path) as fleet:
        await fleet.joined("other", lender=engine)
        for step in range(3):  # from two ranks to a group: processes are killed
            await serves(fleet, step, engine)
    assert all(all(ended) for ended in seen) and len(seen) >= 3


def test_a_handle_is_a_name_and_nothing_else() -> None:
    from tests.doubles.device import opened as opened_memory

    for handle in (b"../etc/passwd", b"meshrl-0123456789abcdef.device/..", b""):
        with pytest.raises(RuntimeError, match="is no handle"):
            opened_memory(handle, 16)
