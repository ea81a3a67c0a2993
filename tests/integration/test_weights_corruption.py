"""Spoiled weights over a real gRPC server: what flips on the way or at rest is found, mended or withdrawn."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.contract.errors import CorruptError
from meshrl.contract.types import Uint8, Version
from meshrl.weights.fleet import ReplicaState
from tests.doubles.weights import StubSource

from ..waiting import until
from .weights_fleet import RUN, flip, opened


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize("spoil", [lambda path: flip(path, -5), cut], ids=["flipped", "cut short"])
async def test_a_file_that_was_spoiled_is_found_and_written_again(
    spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    async with opened("disk", tmp_path) as fleet:
        await fleet.joined("one")
        source = fleet.source(0)
        await fleet.carry(source)
        path = tmp_path / "weights" / "1.0" / "model-00003-of-00004.safetensors"
        healthy = path.read_bytes()
        spoil(path)
        late = await fleet.joined_late("late")
        assert late.hashes == source.manifest.bucket_hashes
        assert path.read_bytes() == healthy


async def test_a_replica_that_reads_corrupted_bytes_again_and_again_is_quarantined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared, stale = tmp_path / "shared", tmp_path / "stale"
    async with opened("disk", shared) as fleet:
        (good,) = await fleet.joined("good")
        await fleet.carry(fleet.source(0))
        # A mount of its own, with a flipped byte in it, that no repair of the trainer's reaches.
        shutil.copytree(shared, stale)
        flip(stale / "weights" / "1.0" / "model-00002-of-00004.safetensors", -5)
        ill = fleet.join("ill", directory=stale)
        await until(lambda: fleet.state_of("ill") is ReplicaState.OUT)
        assert "buckets [1] of weights 1.0 arrived corrupted, again and again" in fleet.reason_of(
            "ill"
        )
        assert "weights 1.0 arrived wrong: bucket 1: layers.1.down.weight" in caplog.messages
        await fleet.carry(fleet.source(1))
        assert good.version == Version(1, 1)
        assert ill.commits == []


class Rotten(StubSource):
    """Its memory changed after the manifest was made."""

    def bucket(self, index: int) -> Uint8:
        bucket = super().bucket(index).copy()
        bucket[17] ^= 1
        return bucket


async def test_a_version_whose_source_changed_is_withdrawn_and_the_trainer_gets_an_error(
    carrier: str, tmp_path: Path
) -> None:
    async with opened(carrier, tmp_path) as fleet:
        engines = await fleet.joined("one", "two")
        await fleet.carry(fleet.source(0))
        with pytest.raises(CorruptError, match=r"trainer's memory changed.*layers\.\d\.up\.weight"):
            await fleet.carry(Rotten(RUN, Version(1, 1)))
        assert [engine.commits for engine in engines] == [[Version(1, 0)]] * 2
        await fleet.carry(fleet.source(2))
        assert [engine.version for engine in engines] == [Version(1, 2)] * 2
        assert fleet.published == [Version(1, 0), Version(1, 2)]
