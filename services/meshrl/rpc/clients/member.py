"""A rollout worker elsewhere, for those who look after the fleet."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.contract import codec
from meshrl.contract.stage_worker import StageStats
from meshrl.contract.types import EngineStats
from meshrl.rollout.worker_report import WorkerReport
from meshrl.rpc.clients.peer import STAGE_PATIENCE_S, Wire
from meshrl.v1 import member_pb2 as pb
from meshrl.v1 import member_pb2_grpc as rpc


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReport:
    """A worker and its engine at one instant."""

    engine: EngineStats
    worker: WorkerReport


class MemberClient(Wire):
    """Asks a member how it does, and asks it to leave."""

    def __init__(self, address: str, *, patience_s: float = STAGE_PATIENCE_S) -> None:
        super().__init__("rollout", address, patience_s)
        self._stub = rpc.MemberStub(self._peer.channel)

    async def report(self) -> MemberReport:
        """How it does now."""
        return await self._peer.ask(self._stub.GetReport, pb.GetReportRequest(), _decode)

    async def drain(self) -> None:
        """Have it hand over what runs and end; returns at once."""
        await self._peer.ask(self._stub.Drain, pb.DrainRequest(), lambda _: None)


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
