"""Why rollout workers do not sample, as they tell the trainer: the queue only knows that nobody leases rows."""

from __future__ import annotations

from collections.abc import Collection

from meshrl.common.plain_text import counted
from meshrl.contract.errors import MeshError
from meshrl.contract.types import Waiting
from meshrl.rollout.circuit_breaker import CircuitState
from meshrl.rollout.ports import NO_BREAKER, UNSERVED
from meshrl.weights.fleet import FleetView, fetch_fleet

ANSWER_S = 3.0
"""How long the trainer is waited for."""
WELL = (CircuitState.CLOSED, NO_BREAKER)


async def fleet_waits(trainer: str | None, workers: Collection[str]) -> list[Waiting]:
    """A line for each of `workers`, by name, that cannot sample now, as the trainer at `host:port` knows it."""
    if trainer is None or not workers:
        return []
    try:
        fleet = await fetch_fleet(trainer, ANSWER_S)
    except MeshError as error:
        return [_wait("the rollout workers", f"the trainer, to which they report: {error}")]
    reasons = {name: _why_not_sampling(fleet, name) for name in workers}
    return [_wait(name, what) for name, what in reasons.items() if what]


def _wait(who: str, what: str) -> Waiting:
    return Waiting(who=who, what=what, since_s=0.0, owners=(who,))


def _why_not_sampling(fleet: FleetView, name: str) -> str:
    replica = next((each for each in fleet.replicas if each.name == name), None)
    if replica is None:
        return "a connection to the trainer, which has never heard of it"
    report = replica.report
    if report is None:
        return f"a report: {replica.reason or 'it has sent none'}"
    worker = report.worker
    if worker.breaker not in WELL:
        times = f"breaker {worker.breaker}, opened {counted(worker.opened, 'time')}"
        return f"its engine, which fails: {worker.last_fault} ({times})"
    if report.engine.version == UNSERVED:
        return "its engine, which serves no version yet"
    return ""
