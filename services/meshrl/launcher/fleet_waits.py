"""Why rollout workers do not sample, asked of the workers: the queue only knows that nobody leases rows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from meshrl.contract.errors import MeshError
from meshrl.contract.types import Waiting
from meshrl.contract.words import counted
from meshrl.rollout.circuit_breaker import CircuitState
from meshrl.rollout.ports import NO_BREAKER, UNSERVED
from meshrl.rpc.clients.member import MemberClient, MemberReport

RETRY_S = 1.0
"""How long a worker that does not answer is tried."""
WELL = (CircuitState.CLOSED, NO_BREAKER)


async def fleet_waits(fleet: Mapping[str, str]) -> list[Waiting]:
    """A line for each of `fleet` (addresses by name) that cannot sample now."""
    reasons = await asyncio.gather(*(_why_not_sampling(address) for address in fleet.values()))
    return [
        Waiting(who=name, what=what, since_s=0.0, owners=(name,))
        for name, what in zip(fleet, reasons, strict=True)
        if what
    ]


async def _why_not_sampling(address: str) -> str:
    async with MemberClient(address, retry_s=RETRY_S) as member:
        try:
            return _reason(await member.report())
        except MeshError as error:
            return f"an answer: {error}"


def _reason(report: MemberReport) -> str:
    worker = report.worker
    if worker.breaker not in WELL:
        times = f"breaker {worker.breaker}, opened {counted(worker.opened, 'time')}"
        return f"its engine, which fails: {worker.last_fault} ({times})"
    if report.engine.version == UNSERVED:
        return "its engine, which serves no version yet"
    return ""
