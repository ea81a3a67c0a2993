"""Versions and epochs of the weight plane over a real gRPC server: nothing goes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from meshrl.contract.errors import ConflictError
from meshrl.contract.types import Version
from meshrl.v1 import weights_pb2 as pb
from meshrl.v1 import weights_pb2_grpc
from meshrl.weights.fleet import ReplicaState
from tests.doubles.weights import StubSource

from ..waiting import until
from .weights_fleet import RUN, opened


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
