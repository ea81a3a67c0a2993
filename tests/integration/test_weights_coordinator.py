"""The weight plane over a real gRPC server, on every carrier: coordinator and replica controllers in one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import ConfigError, ConflictError
from meshrl.contract.types import Version
from meshrl.weights.carrier import Channel, Link, RunPaths
from meshrl.weights.carriers import auto, shm
from meshrl.weights.fleet import ReplicaState, fetch_fleet
from meshrl.weights.transport import Pairs, load_carrier

from ..waiting import until
from .weights_fleet import opened


async def test_twenty_versions_reach_two_replicas_bit_by_bit(carrier: str, tmp_path: Path) -> None:
    async with opened(carrier, tmp_path) as fleet:
        engines = await fleet.joined("one", "two")
        for step in range(20):
            source = fleet.source(step)
            await fleet.carry(source)
            for engine in engines:
                assert engine.version == Version(1, step)
                assert engine.hashes == source.manifest.bucket_hashes
        assert fleet.published == [Version(1, step) for step in range(20)]
        assert [engine.commits for engine in engines] == [fleet.published] * 2


async def test_a_replica_that_joins_late_gets_the_newest_committed_version(
    carrier: str, tmp_path: Path
) -> None:
    async with opened(carrier, tmp_path) as fleet:
        (early,) = await fleet.joined("early")
        for step in range(3):
            await fleet.carry(fleet.source(step))
        late = await fleet.joined_late("late")
        assert late.commits == [Version(1, 2)]
        assert late.hashes == early.hashes
        assert fleet.published == [Version(1, 0), Version(1, 1), Version(1, 2)]
        await fleet.carry(fleet.source(3))
        assert late.version == early.version == Version(1, 3)


async def test_without_replicas_the_newest_version_waits_for_the_first_one(
    carrier: str, tmp_path: Path
) -> None:
    async with opened(carrier, tmp_path) as fleet:
        await fleet.carry(fleet.source(0))
        await fleet.carry(fleet.source(1))
        assert fleet.published == []
        engine = fleet.join("first")
        await until(lambda: fleet.published == [Version(1, 1)])
        assert engine.commits == [Version(1, 1)]


async def test_publishing_twice_is_publishing_once(carrier: str, tmp_path: Path) -> None:
    async with opened(carrier, tmp_path) as fleet:
        (engine,) = await fleet.joined("one")
        await fleet.carry(fleet.source(0))
        await fleet.carry(fleet.source(0))
        await fleet.carry(fleet.source(1))
        assert engine.commits == fleet.published == [Version(1, 0), Version(1, 1)]


class Hidden(shm.Carrier):
    """A carrier whose channels this replica cannot open."""

    def channel(self, link: Link) -> Channel:
        channel = super().channel(link)

        async def refuse(deadline_s: float) -> None:
            raise ConfigError("weights.carrier=shm: another user's memory")

        channel.open = refuse  # type: ignore[method-assign]
        return channel


async def test_auto_takes_the_next_carrier_for_a_replica_that_cannot_open_the_first(
    tmp_path: Path,
) -> None:
    def load(config: WeightsConfig, paths: RunPaths) -> Pairs:
        return (Hidden if config.carrier == "shm" else load_carrier)(config, paths)

    async with opened("auto", tmp_path) as fleet:
        engine = fleet.join("one", transport=auto.Carrier(fleet.config, fleet.paths, load))
        fleet.join("two")
        await fleet.carry(fleet.source(0))
        await until(lambda: fleet.state_of("one") is ReplicaState.SERVING)
        carriers = {view.name: view.carrier for view in fleet.coordinator.fleet().replicas}
        assert carriers == {"one": "gloo", "two": "shm"}
        assert engine.hashes == fleet.source(0).manifest.bucket_hashes


async def test_a_queue_that_refuses_a_version_is_reported_to_the_trainer(tmp_path: Path) -> None:
    async with opened("disk", tmp_path) as fleet:

        async def refuse(version: Version) -> None:
            raise ConflictError(f"no {version}")

        fleet.coordinator._on_committed = refuse
        await fleet.joined("one")
        await fleet.coordinator.publish(fleet.source(0))
        with pytest.raises(ConflictError, match=r"no 1\.0"):
            await fleet.coordinator.drained()


async def test_fleet_lists_the_replicas_over_grpc(tmp_path: Path) -> None:
    async with opened("disk", tmp_path) as fleet:
        await fleet.joined("one")
        await fleet.carry(fleet.source(3))
        fleet_view = await fetch_fleet(f"127.0.0.1:{fleet.port}", 10.0)
        assert fleet_view == fleet.coordinator.fleet()
        assert (fleet_view.committed, fleet_view.proposed) == (Version(1, 3), None)
        (one,) = fleet_view.replicas
        assert (one.name, one.state) == ("one", ReplicaState.SERVING)
        assert one.last_sync_s > 0


async def test_the_disk_carrier_keeps_two_versions_that_safetensors_reads(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    async with opened("disk", tmp_path) as fleet:
        await fleet.close_coordinator()
        fleet.paths = RunPaths(directory=tmp_path, model_path=model)
        await fleet.open_coordinator()
        fleet.join("one")
        for step in range(4):
            await fleet.carry(fleet.source(step))
        root = tmp_path / "weights"
        assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ["1.2", "1.3"]
        assert (root / "1.3" / "config.json").read_text() == "{}"
        source = fleet.source(3)
        tensor = source.manifest.tensors[3]
        loaded = load_file(root / "1.3" / "model-00002-of-00004.safetensors")[tensor.name]
        sent = source.bucket(1)[tensor.offset : tensor.offset + tensor.nbytes]
        assert loaded.shape == tensor.shape
        assert np.array_equal(loaded.reshape(-1).view(np.uint8), sent)
