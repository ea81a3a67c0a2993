"""Lets operators inspect and drain a rollout worker. meshrl/v1/member.proto describes each method."""
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import grpc

from meshrl.contract import codec
from meshrl.contract.types import EngineStats
from meshrl.rollout.ports import WorkerReport
from meshrl.rpc.interceptors import Context, full_name
from meshrl.v1 import member_pb2 as pb
from meshrl.v1 import member_pb2_grpc as rpc


class Reporting(Protocol):
    """The part of a worker that this servicer shows."""

    def report(self) -> WorkerReport: ...


class Measured(Protocol):
    """The part of an engine that this servicer shows."""

    def stats(self) -> EngineStats: ...


class MemberServicer(rpc.MemberServicer):
    """Translates and delegates."""

    service: Final = full_name(pb.DESCRIPTOR, "Member")
    waits: Final[frozenset[str]] = frozenset()

    def __init__(self, worker: Reporting, engine: Measured, leave: Callable[[], None]) -> None:
        """`leave` begins to end this process, as SIGTERM does."""
        self._worker = worker
        self._engine = engine
        self._leave = leave

    def attach(self, server: grpc.aio.Server) -> None:
        rpc.add_MemberServicer_to_server(self, server)

    async def GetReport(self, request: pb.GetReportRequest, context: Context) -> pb.MemberReport:
        report = self._worker.report()
        return pb.MemberReport(
            engine=codec.encode_engine_stats(self._engine.stats()),
            held=report.held,
            slots=report.slots,
            leased=report.rows.leased,
            written=report.rows.written,
            failed=report.rows.failed,
            returned=report.rows.returned,
            lost=report.rows.lost,
            breaker=report.breaker,
            error_rate=report.error_rate,
            last_fault=report.last_fault,
            opened=report.opened,
            continued=report.continued,
            draining=report.draining,
        )

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        self._leave()
        return pb.DrainResponse()
