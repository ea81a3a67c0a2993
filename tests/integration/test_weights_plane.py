"""The weight plane over a real gRPC server, on every carrier: a plane and its agents in one process."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Self

import grpc
import numpy as np
import pytest

from meshrl.contract.errors import ConflictError, CorruptError, UserError
from meshrl.contract.nouns import OnUpdate, Uint8, Version, WeightManifest
from meshrl.services.runtime import Server, ServerSettings
from meshrl.services.weights.agent import PoisonedError, WeightAgent
from meshrl.services.weights.carrier import Place
from meshrl.services.weights.config import WeightsConfig
from meshrl.services.weights.door import WeightsDoor
from meshrl.services.weights.fleet import ReplicaState, fetch_fleet
from meshrl.services.weights.plane import WeightPlane
from meshrl.services.weights.stub import HashSink, MadeSource
from meshrl.v1 import weights_pb2 as pb
from meshrl.v1 import weights_pb2_grpc

RUN = "weights-test"


class Fleet:
    """A plane behind a server, and agents with stub engines."""

    def __init__(self, config: WeightsConfig, directory: Path, epoch: int, port: int) -> None:
        self.config = config
        self.place = Place(directory=directory)
        self.epoch = epoch
        self.port = port
        self.published: list[Version] = []
        self.agents: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        self._planes = AsyncExitStack()
        await self.open_plane()
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self.agents.values():
            task.cancel()
        await asyncio.gather(*self.agents.values(), return_exceptions=True)
        await self.close_plane()

    async def open_plane(self) -> None:
        async def on_committed(version: Version) -> None:
            self.published.append(version)

        self.plane = WeightPlane(
            self.config, run=RUN, epoch=self.epoch, place=self.place, on_committed=on_committed
        )
        await self.plane.start()
        settings = ServerSettings(port=self.port, metrics_port=None, drain_grace_s=0)
        self.server = await self._planes.enter_async_context(
            Server(settings, [WeightsDoor(self.plane)])
        )
        self.port = self.server.port

    async def close_plane(self) -> None:
        await self.plane.close()
        await self._planes.aclose()

    def join(
        self,
        name: str,
        engine: HashSink | None = None,
        run: str = RUN,
        directory: Path | None = None,
    ) -> HashSink:
        engine = engine or HashSink()
        agent = WeightAgent(
            self.config,
            run=run,
            replica=name,
            engine=engine,
            on_update=OnUpdate.IN_FLIGHT,
            place=Place(directory=directory) if directory else self.place,
            connect=lambda: grpc.aio.insecure_channel(f"127.0.0.1:{self.port}"),
        )
        self.agents[name] = asyncio.create_task(agent.run())
        return engine

    async def carry(self, source: MadeSource) -> None:
        await self.plane.publish(source)
        await self.plane.drained()

    def source(self, step: int) -> MadeSource:
        return MadeSource(RUN, Version(self.epoch, step))

    def state_of(self, name: str) -> ReplicaState | None:
        return next((view.state for view in self.plane.fleet().replicas if view.name == name), None)

    def reason_of(self, name: str) -> str:
        return next(view.reason for view in self.plane.fleet().replicas if view.name == name)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it; the suite's own timeout is the deadline."""
    while not condition():  # noqa: ASYNC110 - the condition lies on the other side of a socket
        await asyncio.sleep(0.01)


@asynccontextmanager
async def opened(carrier: str, directory: Path, **options: object) -> AsyncIterator[Fleet]:
    # No GPU is needed: the carrier's processes speak through sockets here.
    options = {
        "nccl": {"library": "stub"},
        "ipc": {"library": "stub"},
        "directory": str(directory / "objects"),
        **options,
    }
    config = WeightsConfig.model_validate({"carrier": carrier, **options})
    async with Fleet(config, directory, epoch=1, port=0) as fleet:
        yield fleet


@pytest.fixture(params=["gloo", "disk", "shm", "cuda_ipc", "auto", "nccl", "delta", "object"])
def carrier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_twenty_versions_reach_two_replicas_bit_by_bit(carrier: str, tmp_path: Path) -> None:
    async with opened(carrier, tmp_path) as fleet:
        engines = [fleet.join("one"), fleet.join("two")]
        await until(lambda: len(fleet.plane.fleet().replicas) == 2)
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
        early = fleet.join("early")
        await until(lambda: len(fleet.plane.fleet().replicas) == 1)
        for step in range(3):
            await fleet.carry(fleet.source(step))
        late = fleet.join("late")
        await until(lambda: fleet.state_of("late") is ReplicaState.SERVING)
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
        engine = fleet.join("one")
        await until(lambda: fleet.state_of("one") is not None)
        await fleet.carry(fleet.source(0))
        await fleet.carry(fleet.source(0))
        await fleet.carry(fleet.source(1))
        assert engine.commits == fleet.published == [Version(1, 0), Version(1, 1)]


async def test_versions_never_go_back(tmp_path: Path) -> None:
    async with opened("disk", tmp_path) as fleet:
        fleet.join("one")
        await fleet.carry(fleet.source(5))
        with pytest.raises(ConflictError, match=r"1\.4 after 1\.5"):
            await fleet.plane.publish(fleet.source(4))
        with pytest.raises(ConflictError, match="epoch 1"):
            await fleet.plane.publish(MadeSource(RUN, Version(2, 6)))


async def test_agents_follow_a_trainer_that_resumes_at_an_older_step_with_a_higher_epoch(
    carrier: str, tmp_path: Path
) -> None:
    async with opened(carrier, tmp_path) as fleet:
        engine = fleet.join("one")
        await fleet.carry(fleet.source(7))
        await fleet.close_plane()
        fleet.epoch = 2
        await fleet.open_plane()
        await fleet.carry(fleet.source(5))
        await until(lambda: engine.version == Version(2, 5))
        assert engine.hashes == fleet.source(5).manifest.bucket_hashes


async def test_a_plane_whose_epoch_is_over_is_refused(tmp_path: Path) -> None:
    async with opened("disk", tmp_path) as fleet:
        fleet.epoch = 4
        await fleet.close_plane()
        await fleet.open_plane()
        engine = fleet.join("one")
        await fleet.carry(fleet.source(0))
        await until(lambda: engine.version == Version(4, 0))
        await fleet.close_plane()
        fleet.epoch = 3
        await fleet.open_plane()
        await fleet.carry(fleet.source(9))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.port}") as channel:
            call = weights_pb2_grpc.WeightsStub(channel).Join()
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


async def test_an_agent_hangs_up_on_a_trainer_whose_epoch_is_over(tmp_path: Path) -> None:
    async with opened("disk", tmp_path) as fleet:
        await fleet.close_plane()
        fleet.epoch = 4
        await fleet.open_plane()
        engine = fleet.join("one")
        await until(lambda: fleet.state_of("one") is not None)
        await fleet.carry(fleet.source(0))
        await fleet.close_plane()
        pretender, server = Pretender(), grpc.aio.server()
        weights_pb2_grpc.add_WeightsServicer_to_server(pretender, server)
        server.add_insecure_port(f"127.0.0.1:{fleet.port}")
        await server.start()
        await until(lambda: pretender.joined >= 3)
        await server.stop(0)
        assert set(pretender.heard) == {"hello"}
        assert engine.version == Version(4, 0)


class OnceRotten(MadeSource):
    """Hands one bucket out flipped the first time that it is asked for."""

    spoiled = False

    def bucket(self, index: int) -> Uint8:
        bucket = super().bucket(index)
        if index == 2 and not self.spoiled:
            self.spoiled = True
            bucket = bucket.copy()
            bucket[17] ^= 1
        return bucket


async def test_a_byte_that_flips_on_the_way_is_sent_again(tmp_path: Path) -> None:
    async with opened("gloo", tmp_path) as fleet:
        engine = fleet.join("one")
        source = OnceRotten(RUN, Version(1, 0))
        await fleet.carry(source)
        await until(lambda: fleet.published == [Version(1, 0)])
        assert source.spoiled
        assert engine.hashes == source.manifest.bucket_hashes


async def test_a_byte_that_flips_on_disk_is_found_and_written_again(tmp_path: Path) -> None:
    async with opened("disk", tmp_path) as fleet:
        fleet.join("one")
        await until(lambda: fleet.state_of("one") is not None)
        source = fleet.source(0)
        await fleet.carry(source)
        path = tmp_path / "weights" / "1.0" / "model-00003-of-00004.safetensors"
        content = bytearray(path.read_bytes())
        healthy = bytes(content)
        content[-5] ^= 1
        path.write_bytes(content)
        late = fleet.join("late")
        await until(lambda: fleet.state_of("late") is ReplicaState.SERVING)
        assert late.hashes == source.manifest.bucket_hashes
        assert path.read_bytes() == healthy


async def test_a_file_cut_short_is_found_and_written_again(tmp_path: Path) -> None:
    async with opened("disk", tmp_path) as fleet:
        fleet.join("one")
        await until(lambda: fleet.state_of("one") is not None)
        source = fleet.source(0)
        await fleet.carry(source)
        path = tmp_path / "weights" / "1.0" / "model-00001-of-00004.safetensors"
        path.write_bytes(path.read_bytes()[:1000])
        late = fleet.join("late")
        await until(lambda: fleet.state_of("late") is ReplicaState.SERVING)
        assert late.hashes == source.manifest.bucket_hashes


async def test_a_replica_that_reads_corrupted_bytes_again_and_again_is_quarantined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared, stale = tmp_path / "shared", tmp_path / "stale"
    async with opened("disk", shared) as fleet:
        good = fleet.join("good")
        await until(lambda: fleet.state_of("good") is not None)
        await fleet.carry(fleet.source(0))
        # A mount of its own, with a flipped byte in it, that no repair of the trainer's reaches.
        shutil.copytree(shared, stale)
        path = stale / "weights" / "1.0" / "model-00002-of-00004.safetensors"
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
        ill = fleet.join("ill", directory=stale)
        await until(lambda: fleet.state_of("ill") is ReplicaState.OUT)
        assert "buckets [1] of weights 1.0 arrived corrupted 3 times" in fleet.reason_of("ill")
        assert "weights 1.0 arrived wrong: bucket 1: layers.1.down.weight" in caplog.messages
        await fleet.carry(fleet.source(1))
        assert good.version == Version(1, 1)
        assert ill.commits == []


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


BROKEN = """
from meshrl.contract.errors import UnavailableError

RATE = 1e12


class Carrier:
    def __init__(self, config, place): ...
    async def listen(self): return "nowhere"
    async def stage(self, source): ...
    def cell(self, link): return Cell()
    async def close(self): ...


class Cell:
    async def open(self, deadline_s): ...
    async def send(self, manifest, index, bucket): raise UnavailableError("the wire is cut")
    async def receive(self, manifest, index, into): raise UnavailableError("the wire is cut")
    def committed(self, version): ...
    def abort(self): ...
    async def close(self): ...
"""


async def test_auto_takes_the_next_carrier_when_one_failed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_way").mkdir()
    (tmp_path / "broken_way" / "wire.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    async with opened("auto", tmp_path, among=("broken_way.wire", "shm")) as fleet:
        engine = fleet.join("one")
        await fleet.carry(fleet.source(0))
        await until(lambda: fleet.published == [Version(1, 0)])
        (view,) = fleet.plane.fleet().replicas
        assert (view.carrier, view.generation) == ("shm", 3)
        assert engine.hashes == fleet.source(0).manifest.bucket_hashes


async def test_a_replica_on_another_host_is_refused_where_only_this_host_is_reached(
    tmp_path: Path,
) -> None:
    async with opened("shm", tmp_path) as fleet:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.port}") as channel:
            call = weights_pb2_grpc.WeightsStub(channel).Join()
            hello = pb.ReplicaHello(replica="far", host="elsewhere", carriers=["shm"])
            await call.write(pb.ReplicaMessage(stamp=pb.WeightStamp(run=RUN), hello=hello))
            answer = await call.read()
        assert "no carrier of weights reaches far" in answer.abort.message


class Rotten(MadeSource):
    """Its memory changed after the manifest was made."""

    def bucket(self, index: int) -> Uint8:
        bucket = super().bucket(index).copy()
        bucket[17] ^= 1
        return bucket


async def test_a_version_whose_source_changed_is_withdrawn_and_the_trainer_is_told(
    carrier: str, tmp_path: Path
) -> None:
    async with opened(carrier, tmp_path) as fleet:
        engines = [fleet.join("one"), fleet.join("two")]
        await until(lambda: len(fleet.plane.fleet().replicas) == 2)
        await fleet.carry(fleet.source(0))
        with pytest.raises(CorruptError, match=r"trainer's memory changed.*layers\.\d\.up\.weight"):
            await fleet.carry(Rotten(RUN, Version(1, 1)))
        assert [engine.commits for engine in engines] == [[Version(1, 0)]] * 2
        await fleet.carry(fleet.source(2))
        assert [engine.version for engine in engines] == [Version(1, 2)] * 2
        assert fleet.published == [Version(1, 0), Version(1, 2)]


class Poisonable(HashSink):
    """Breaks in the middle of a commit."""

    async def commit_weights(self, version: Version, on_update: OnUpdate) -> None:
        if version.step == 1:
            raise RuntimeError("half a model")
        await super().commit_weights(version, on_update)


async def test_an_engine_that_breaks_in_a_commit_is_out_and_its_process_is_told_to_end(
    carrier: str, tmp_path: Path
) -> None:
    async with opened(carrier, tmp_path) as fleet:
        healthy, ill = fleet.join("healthy"), fleet.join("ill", Poisonable())
        await until(lambda: len(fleet.plane.fleet().replicas) == 2)
        await fleet.carry(fleet.source(0))
        await fleet.carry(fleet.source(1))
        assert fleet.published == [Version(1, 0), Version(1, 1)]
        assert (healthy.version, ill.version) == (Version(1, 1), Version(1, 0))
        assert fleet.state_of("ill") is ReplicaState.OUT
        assert "half a model" in fleet.reason_of("ill")
        with pytest.raises(PoisonedError, match="half a model"):
            await fleet.agents.pop("ill")


class Misfit(HashSink):
    """Another model."""

    async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
        raise UserError("layers.0.up.weight: this model has no such tensor")


async def test_weights_that_do_not_fit_the_model_end_that_replica_alone(tmp_path: Path) -> None:
    async with opened("disk", tmp_path) as fleet:
        good = fleet.join("good")
        fleet.join("misfit", Misfit())
        await until(lambda: len(fleet.plane.fleet().replicas) == 2)
        await fleet.carry(fleet.source(0))
        assert good.version == Version(1, 0)
        assert "no such tensor" in fleet.reason_of("misfit")
        with pytest.raises(UserError, match="no such tensor"):
            await fleet.agents.pop("misfit")


class Stuck(HashSink):
    """Never finishes staging."""

    async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
        await asyncio.Event().wait()


async def test_a_replica_without_progress_becomes_suspect_and_then_out_while_the_other_commits(
    carrier: str, tmp_path: Path
) -> None:
    async with opened(carrier, tmp_path, base_s=1.0) as fleet:
        good = fleet.join("good")
        fleet.join("stuck", Stuck())
        await until(lambda: len(fleet.plane.fleet().replicas) == 2)
        await fleet.plane.publish(fleet.source(0))
        await until(lambda: fleet.state_of("stuck") is ReplicaState.SUSPECT)
        assert fleet.published == []
        assert good.version is None
        await fleet.plane.drained()
        assert fleet.published == [Version(1, 0)]
        assert good.version == Version(1, 0)
        assert "PREPARED" in fleet.reason_of("stuck")


async def test_a_quorum_commits_and_the_straggler_follows(tmp_path: Path) -> None:
    gate = asyncio.Event()

    class Slow(HashSink):
        async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
            await gate.wait()
            await super().stage_weights(manifest, buckets)

    async with opened("disk", tmp_path, quorum=0.5) as fleet:
        fast = fleet.join("fast")
        slow = fleet.join("slow", Slow())
        await until(lambda: len(fleet.plane.fleet().replicas) == 2)
        await fleet.carry(fleet.source(0))
        assert fleet.published == [Version(1, 0)]
        assert (fast.version, slow.version) == (Version(1, 0), None)
        gate.set()
        await until(lambda: fleet.state_of("slow") is ReplicaState.SERVING)
        assert slow.version == Version(1, 0)


async def test_stragglers_are_waited_for_half_as_long_again_where_the_late_quorum_is_lower(
    tmp_path: Path,
) -> None:
    gate = asyncio.Event()

    class Slow(HashSink):
        async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
            await gate.wait()
            await super().stage_weights(manifest, buckets)

    async with opened("disk", tmp_path, late_quorum=0.5, late_s=0.0) as fleet:
        engines = [fleet.join("one"), fleet.join("two")]
        slow = fleet.join("slow", Slow())
        await until(lambda: len(fleet.plane.fleet().replicas) == 3)
        await fleet.carry(fleet.source(0))
        assert [engine.version for engine in engines] == [Version(1, 0)] * 2
        assert slow.version is None
        assert fleet.state_of("slow") is not ReplicaState.OUT
        await fleet.carry(fleet.source(1))
        gate.set()
        await until(lambda: slow.version == Version(1, 1))
        assert fleet.published == [Version(1, 0), Version(1, 1)]


async def test_a_replica_of_another_run_is_told_so(tmp_path: Path) -> None:
    async with opened("disk", tmp_path) as fleet:
        fleet.join("stranger", run="elsewhere")
        with pytest.raises(UserError, match="carries run 'weights-test', not 'elsewhere'"):
            await fleet.agents.pop("stranger")


async def test_a_queue_that_refuses_a_version_is_reported_to_the_trainer(tmp_path: Path) -> None:
    async with opened("disk", tmp_path) as fleet:

        async def refuse(version: Version) -> None:
            raise ConflictError(f"no {version}")

        fleet.plane._on_committed = refuse
        fleet.join("one")
        await until(lambda: fleet.state_of("one") is not None)
        await fleet.plane.publish(fleet.source(0))
        with pytest.raises(ConflictError, match=r"no 1\.0"):
            await fleet.plane.drained()


async def test_fleet_lists_the_replicas_over_the_wire(tmp_path: Path) -> None:
    async with opened("disk", tmp_path) as fleet:
        fleet.join("one")
        await until(lambda: fleet.state_of("one") is not None)
        await fleet.carry(fleet.source(3))
        fleet_view = await fetch_fleet(f"127.0.0.1:{fleet.port}", 10.0)
        assert fleet_view == fleet.plane.fleet()
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
        await fleet.close_plane()
        fleet.place = Place(directory=tmp_path, model_path=model)
        await fleet.open_plane()
        fleet.join("one")
        for step in range(4):
            await fleet.carry(fleet.source(step))
        root = tmp_path / "weights"
        assert sorted(path.name for path in root.iterdir()) == ["1.2", "1.3"]
        assert (root / "1.3" / "config.json").read_text() == "{}"
        source = fleet.source(3)
        tensor = source.manifest.tensors[3]
        loaded = load_file(root / "1.3" / "model-00002-of-00004.safetensors")[tensor.name]
        sent = source.bucket(1)[tensor.offset : tensor.offset + tensor.nbytes]
        assert loaded.shape == tensor.shape
        assert np.array_equal(loaded.reshape(-1).view(np.uint8), sent)
