"""Client for operators of a rollout worker."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.contract import codec
from meshrl.contract.stage_worker import StageStats
from meshrl.contract.types import EngineStats
from meshrl.rollout.ports import WorkerReport
from meshrl.rpc.clients.base import SERVICE_RETRY_S, GrpcClient, discard
from meshrl.v1 import member_pb2 as pb
from meshrl.v1 import member_pb2_grpc as rpc


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReport:
    """The state of a worker and its engine at one instant."""

    engine: EngineStats
    worker: WorkerReport


class MemberClient(GrpcClient):
    """Reads a worker's report, and drains the worker."""

    def __init__(self, address: str, *, retry_s: float = SERVICE_RETRY_S) -> None:
        super().__init__("rollout", address, retry_s)
        self._stub = rpc.MemberStub(self._connection.channel)

    async def report(self) -> MemberReport:
        """The present state."""
        return await self._connection.call(self._stub.GetReport, pb.GetReportRequest(), _decode)

    async def drain(self) -> None:
        """Let the worker hand over its running rows and end. Returns at once."""
        await self._connection.call(self._stub.Drain, pb.DrainRequest(), discard)


def _decode(message: pb.MemberReport) -> MemberReport:
    rows = StageStats(
        leased=message.leased,
        written=message.written,
        failed=message.failed,
        returned=message.returned,
        lost=message.lost,
    )
    worker = WorkerReport(
        held=message.held,
        slots=message.slots,
        rows=rows,
        breaker=message.breaker,
        error_rate=message.error_rate,
        last_fault=message.last_fault,
        opened=message.opened,
        continued=message.continued,
        draining=message.draining,
    )
    return MemberReport(engine=codec.decode_engine_stats(message.engine), worker=worker)
