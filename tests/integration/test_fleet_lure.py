"""Reading and draining the fleet shows no credential at an address that a worker names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from meshrl.cli.commands import fleet as command
from meshrl.cli.find_mesh import MeshAddress, read_membership
from meshrl.contract.errors import ForbiddenError, NotFoundError
from meshrl.contract.stage_worker import StageStats
from meshrl.contract.types import EngineStats, Version
from meshrl.launcher.observer import fleet_waits
from meshrl.rollout.ports import WorkerReport
from meshrl.rpc import credentials, tls
from meshrl.rpc.credentials import Credential, MeshRole, ensure_credentials, file_of_role
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.v1 import weights_pb2 as pb
from meshrl.v1 import weights_pb2_grpc as rpc
from meshrl.weights.carrier import host_id
from meshrl.weights.fleet import REPLICA_REPORT, ReplicaReport, drain_replica
from meshrl.weights.messages import stamp
from meshrl.weights.servicer import WeightsServicer

from ..waiting import until
from .weights_fleet import RUN, Fleet, opened

REPORT = ReplicaReport(
    engine=EngineStats(
        version=Version(0, 0),
        running=3,
        capacity=8,
        tokens_per_s=5.0,
        tokens_generated=9,
        updates=0,
        update_pause_s=0.0,
    ),
    worker=WorkerReport(
        held=3,
        slots=8,
        rows=StageStats(leased=4, written=1),
        breaker="closed",
        error_rate=0.0,
        last_fault="a fault " * 1000,
        opened=0,
        continued=0,
        draining=False,
    ),
)


@pytest.fixture(autouse=True)
def operator(tmp_path: Path) -> Iterator[None]:
    ensure_credentials(tmp_path)
    credentials.use(Credential(file_of_role(tmp_path, MeshRole.OPERATOR)))
    yield
    credentials.use(None)


@asynccontextmanager
async def asking(fleet: Fleet, run_dir: Path) -> AsyncIterator[str]:
    """The address of the trainer, which asks who calls."""
    verifiers = credentials.verifiers_file(run_dir)
    settings = ServerSettings(metrics_port=None, drain_grace_s=0, verifiers=verifiers)
    async with GrpcServer(settings, [WeightsServicer(fleet.coordinator)]) as server:
        yield server.address


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A port that a worker names, and what is sent to it."""
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(1 << 16))
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", heard


def hello(address: str = "") -> pb.ReplicaMessage:
    """A worker's first message; with an `address` in field 7, where one once stood."""
    body = pb.ReplicaHello(replica="rollout-0", host=host_id(), carriers=["shm"])
    if address:
        body.MergeFromString(bytes([7 << 3 | 2, len(address)]) + address.encode())
    return pb.ReplicaMessage(stamp=stamp(RUN, 0, None), hello=body)


async def test_the_fleet_is_read_and_drained_without_a_call_to_an_address_of_a_worker(
    tmp_path: Path,
) -> None:
    rollout = Credential(file_of_role(tmp_path, MeshRole.ROLLOUT))
    async with (
        opened("shm", tmp_path) as fleet,
        asking(fleet, tmp_path) as trainer,
        listening() as (address, heard),
        tls.channel(trainer, credential=rollout) as channel,
    ):
        stream = rpc.WeightsStub(channel).Join(None)
        await stream.write(hello(address))
        refused = await stream.read()
        assert isinstance(refused, pb.PlaneMessage) and refused.abort.final, refused
        stream = rpc.WeightsStub(channel).Join(None)
        await stream.write(hello())
        welcome = await stream.read()
        assert isinstance(welcome, pb.PlaneMessage) and welcome.HasField("welcome"), welcome
        about = stamp(RUN, welcome.stamp.generation, None)
        await stream.write(pb.ReplicaMessage(stamp=about, report=REPLICA_REPORT.encode(REPORT)))
        await until(lambda: fleet.coordinator.fleet().replicas[0].report is not None)

        (member,) = (await read_membership(MeshAddress(trainer=trainer))).members.values()
        assert member.report is not None and member.report.engine == REPORT.engine
        assert member.report.worker.rows == REPORT.worker.rows
        assert len(member.report.worker.last_fault) < 3000
        assert command.membership_json(await read_membership(MeshAddress(trainer=trainer)))
        assert len(await fleet_waits(trainer, ["rollout-0"])) == 1

        await drain_replica(trainer, "rollout-0", 20)
        while not (
            isinstance(told := await stream.read(), pb.PlaneMessage) and told.HasField("leave")
        ):
            pass
        with pytest.raises(NotFoundError, match="no replica 'x' is in the fleet"):
            await drain_replica(trainer, "x", 20)
        stream.cancel()
        await until(lambda: fleet.coordinator.fleet().replicas[0].report is None)
        with pytest.raises(NotFoundError, match="there are: none"):
            await drain_replica(trainer, "rollout-0", 20)
        credentials.use(rollout)
        with pytest.raises(ForbiddenError):
            await drain_replica(trainer, "rollout-0", 20)
        assert heard == []


async def test_a_worker_that_is_drained_hands_over_and_ends(tmp_path: Path) -> None:
    left = asyncio.Event()
    async with opened("shm", tmp_path) as fleet, asking(fleet, tmp_path) as trainer:
        fleet.join("rollout-0", leave=left.set, report=lambda: REPORT)
        await until(lambda: any(view.report for view in fleet.coordinator.fleet().replicas))
        await drain_replica(trainer, "rollout-0", 20)
        async with asyncio.timeout(20):
            await left.wait()


async def test_a_report_that_is_none_costs_only_who_sends_it(tmp_path: Path) -> None:
    async with opened("shm", tmp_path) as fleet, asking(fleet, tmp_path) as trainer:
        rollout = Credential(file_of_role(tmp_path, MeshRole.ROLLOUT))
        async with tls.channel(trainer, credential=rollout) as channel:
            stream = rpc.WeightsStub(channel).Join(None)
            await stream.write(hello())
            welcome = await stream.read()
            assert isinstance(welcome, pb.PlaneMessage) and welcome.HasField("welcome"), welcome
            about = stamp(RUN, welcome.stamp.generation, None)
            await stream.write(pb.ReplicaMessage(stamp=about, report=pb.ReplicaReport()))
            while (told := await stream.read()) is not grpc.aio.EOF:
                assert isinstance(told, pb.PlaneMessage)
                if told.HasField("abort"):
                    assert told.abort.final and "engine is missing" in told.abort.message
        assert fleet.coordinator.fleet().replicas[0].report is None
