"""The weight plane over a real gRPC server, on every carrier: coordinator and replica controllers in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import ConfigError, ConflictError
from meshrl.contract.types import Version
from meshrl.v1 import weights_pb2 as pb
from meshrl.v1 import weights_pb2_grpc
from meshrl.weights.carrier import Channel, Link, RunPaths
from meshrl.weights.carriers import auto, shm
from meshrl.weights.fleet import ReplicaState, fetch_fleet
from meshrl.weights.transport import Pairs, load_carrier
from tests.doubles.weights import StubSource

from ..waiting import until
from .weights_fleet import RUN, opened


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


async def test_versions_never_go_back(tmp_path: Path) -> None:
    async with opened("disk", tmp_path) as fleet:
        fleet.join("one")
        await fleet.carry(fleet.source(5))
        with pytest.raises(ConflictError, match=r"1\.4 after 1\.5"):
            await fleet.coordinator.publish(fleet.source(4))
        with pytest.raises(ConflictError, match="epoch 1"):
            await fleet.coordinator.publish(StubSource(RUN, Version(2, 6)))


async def test_replicas_follow_a_trainer_that_resumes_at_an_older_step_with_a_higher_epoch(
    carrier: str, tmp_path: Path
) -> None:
    async with opened(carrier, tmp_path) as fleet:
        engine = fleet.join("one")
        await fleet.carry(fleet.source(7))
        await fleet.close_coordinator()
        fleet.epoch = 2
        await fleet.open_coordinator()
        await fleet.carry(fleet.source(5))
        await until(lambda: engine.version == Version(2, 5))
        assert engine.hashes == fleet.source(5).manifest.bucket_hashes


async def test_a_coordinator_whose_epoch_is_over_is_refused(tmp_path: Path) -> None:
    async with opened("disk", tmp_path) as fleet:
        fleet.epoch = 4
        await fleet.close_coordinator()
        await fleet.open_coordinator()
        engine = fleet.join("one")
        await fleet.carry(fleet.source(0))
        await until(lambda: engine.version == Version(4, 0))
        await fleet.close_coordinator()
        fleet.epoch = 3
        await fleet.open_coordinator()
        await fleet.carry(fleet.source(9))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.port}") as channel:
            call = weights_pb2_grpc.WeightsStub(channel).Join(wait_for_ready=True)
            hello = pb.ReplicaHello(replica="two", highest_epoch=4)
            await call.write(pb.ReplicaMessage(stamp=pb.WeightStamp(run=RUN), hello=hello))
            answer = await call.read()
        assert answer.abort.code == "fenced"
        assert engine.version == Version(4, 0)
        assert fleet.published == [Version(4, 0)]


class Pretender(weights_pb2_grpc.WeightsServicer):
    """A trainer of an old epoch that lets everybody in."""

    def __init__(self) -> None:
        self.heard: list[str | None] = []
        self.joined = 0

    async def Join(
        self, request_iterator: AsyncIterator[pb.ReplicaMessage], context: object
    ) -> AsyncIterator[pb.PlaneMessage]:
        self.joined += 1
        old = pb.WeightStamp(run=RUN, generation=1, epoch=3)
        self.heard.append((await anext(request_iterator)).WhichOneof("body"))
        yield pb.PlaneMessage(stamp=old, welcome=pb.PlaneWelcome(beat_s=1, silence_s=10))
        yield pb.PlaneMessage(stamp=old, propose=pb.PlanePropose(endpoint="weights"))
        async for message in request_iterator:
            self.heard.append(message.WhichOneof("body"))

    async def Fleet(self, request: pb.FleetRequest, context: object) -> pb.FleetResponse:
        return pb.FleetResponse()


async def test_a_replica_controller_leaves_a_trainer_whose_epoch_is_over(tmp_path: Path) -> None:
    async with opened("disk", tmp_path) as fleet:
        await fleet.close_coordinator()
        fleet.epoch = 4
        await fleet.open_coordinator()
        (engine,) = await fleet.joined("one")
        await fleet.carry(fleet.source(0))
        await fleet.close_coordinator()
        pretender, server = Pretender(), grpc.aio.server()
        weights_pb2_grpc.add_WeightsServicer_to_server(pretender, server)
        server.add_insecure_port(f"127.0.0.1:{fleet.port}")
        await server.start()
        await until(lambda: pretender.joined >= 3)
        await server.stop(0)
        assert set(pretender.heard) == {"hello"}
        assert engine.version == Version(4, 0)


async def test_a_replica_whose_committed_was_lost_counts_when_it_comes_back(tmp_path: Path) -> None:
    async with opened("disk", tmp_path) as fleet:
        await fleet.carry(fleet.source(0))
        assert fleet.published == []
        async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.port}") as channel:
            call = weights_pb2_grpc.WeightsStub(channel).Join()
            hello = pb.ReplicaHello(replica="one", serving=True, carriers=["disk"])
            serves = pb.WeightStamp(run=RUN, epoch=1, step=0)
            await call.write(pb.ReplicaMessage(stamp=serves, hello=hello))
            await until(lambda: fleet.published == [Version(1, 0)])
            assert fleet.state_of("one") is ReplicaState.SERVING
