"""A rollout worker for those who look after the fleet. Each method is described in meshrl/v1/member.proto."""
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import grpc

from meshrl.contract import codec
from meshrl.contract.types import EngineStats
from meshrl.rollout.worker_report import WorkerReport
from meshrl.rpc.interceptors import Context
from meshrl.rpc.servicers.base import full_name
from meshrl.v1 import member_pb2 as pb
from meshrl.v1 import member_pb2_grpc as rpc


class Reporting(Protocol):
    """The part of a worker that this door shows."""

    def report(self) -> WorkerReport: ...


class Measured(Protocol):
    """The part of an engine that this door shows."""

    def stats(self) -> EngineStats: ...


class MemberServicer(rpc.MemberServicer):
    """Translates and delegates."""

    service: Final = full_name(pb.DESCRIPTOR, "Member")
    waits: Final[frozenset[str]] = frozenset()

    def __init__(self, worker: Reporting, engine: Measured, leave: Callable[[], None]) -> None:
        """`leave` begins the end of this process, as SIGTERM does."""
        self._worker = worker
        self._engine = engine
        self._leave = leave

    def attach(self, server: grpc.aio.Server) -> None:
        rpc.add_MemberServicer_to_server(self, server)

    async def GetReport(self, request: pb.GetReportRequest, context: Context) -> pb.MemberReport:
        told = self._worker.report()
        return pb.MemberReport(
            engine=codec.encode_engine_stats(self._engine.stats()),
            held=told.held,
            slots=told.slots,
            leased=told.rows.leased,
            written=told.rows.written,
            failed=told.rows.failed,
            returned=told.rows.returned,
            lost=told.rows.lost,
            breaker=told.breaker,
            error_rate=told.error_rate,
            last_fault=told.last_fault,
            opened=told.opened,
            continued=told.continued,
            draining=told.draining,
        )

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        self._leave()
        return pb.DrainResponse()
