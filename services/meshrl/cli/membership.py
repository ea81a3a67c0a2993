"""The rollout workers of a mesh, put together from the trainer, the workers themselves and the supervisor.

    trainer  which workers get its weights, at which version; what they run and the state of their engines, as they
             report it on the streams by which they have joined
    up       which processes it started, and which have left   (its control socket, on this machine only)

No worker is called: a caller would show its credential at an address that a worker names. Each is asked once, within
ANSWER_S; what one of them does not answer is shown as unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshrl.contract.errors import MeshError, UnavailableError, UserError
from meshrl.launcher.control import Answer, ask_up
from meshrl.weights.fleet import FleetView, ReplicaReport, ReplicaState, ReplicaView, fetch_fleet

ANSWER_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAddress:
    """Where to ask: the `up` of a directory, or a trainer anywhere."""

    trainer: str
    run_dir: Path | None = None
    """None where no `up` of ours runs the mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rollout worker."""

    name: str
    state: str
    """JOINING, SYNCED, SERVING, SUSPECT, OUT; or the phase of its process while the trainer does not know it."""
    replica: ReplicaView | None = None
    """The trainer's state of it."""
    restarts: int | None = None
    """None where it is not a process of our `up`."""
    reason: str = ""

    @property
    def report(self) -> ReplicaReport | None:
        """Its own report; None when the trainer has none."""
        return self.replica.report if self.replica is not None else None

    @property
    def gone(self) -> bool:
        """True when it has left or died."""
        return self.state == ReplicaState.OUT.name

    @property
    def supervised(self) -> bool:
        """True for a process of `up`."""
        return self.restarts is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The fleet at one instant."""

    view: FleetView | None
    """None when the trainer does not answer."""
    members: Mapping[str, Member] = field(default_factory=dict)


async def read_membership(address: MeshAddress) -> Membership:
    """Ask all of them. Raises UnavailableError when none knows of a fleet."""
    view, phases = await asyncio.gather(_view(address.trainer), _phases(address.run_dir))
    if view is None and not phases:
        raise UnavailableError(f"the trainer at {address.trainer} does not answer")
    members = {replica.name: from_coordinator(replica) for replica in view.replicas} if view else {}
    for name, process in phases.items():
        known = members.get(name, Member(name=name, state=str(process["phase"])))
        members[name] = with_supervisor_state(known, process)
    return Membership(view=view, members=dict(sorted(members.items())))


def from_coordinator(replica: ReplicaView) -> Member:
    """A worker as the trainer describes it."""
    return Member(
        name=replica.name,
        state=replica.state.name,
        replica=replica,
        reason=replica.reason,
    )


def with_supervisor_state(member: Member, process: Mapping[str, object]) -> Member:
    """Add the state of the process. One that has ended is OUT, whatever the trainer saw last."""
    phase = str(process["phase"])
    gone = phase in ("drained", "failed")
    return replace(
        member,
        state=ReplicaState.OUT.name if gone else member.state,
        restarts=int(str(process["restarts"])),
        reason=phase if gone or phase in ("draining", "restarting") else member.reason,
    )


async def _view(trainer: str) -> FleetView | None:
    try:
        return await fetch_fleet(trainer, ANSWER_S)
    except UserError:  # it cannot be asked like this
        raise
    except MeshError:
        return None


async def _phases(run_dir: Path | None) -> Mapping[str, Mapping[str, object]]:
    if run_dir is None:
        return {}
    try:
        answer: Answer = await ask_up(run_dir, "members", timeout_s=ANSWER_S)
    except MeshError:
        return {}
    return {name: state for name, state in answer.items() if isinstance(state, dict)}
