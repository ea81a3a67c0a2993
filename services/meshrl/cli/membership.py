"""The rollout workers of a mesh, put together from the trainer, the workers themselves and the supervisor.

    trainer  which workers get its weights, at which version   (the trainer's address)
    workers  what they run and the state of their engines      (the addresses that they gave, or the address book's)
    up       which processes it started, and which have left   (its control socket, on this machine only)

Each is asked once, within ANSWER_S; what one of them does not answer is shown as unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshrl.contract.errors import MeshError, UnavailableError
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, AddressBook
from meshrl.launcher.control import Answer, ask_up
from meshrl.rpc.clients.member import MemberClient, MemberReport
from meshrl.weights.fleet import FleetView, ReplicaState, ReplicaView, fetch_fleet

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
    address: str = ""
    replica: ReplicaView | None = None
    """The trainer's state of it."""
    report: MemberReport | None = None
    """Its own report; None when it does not answer."""
    restarts: int | None = None
    """None where it is not a process of our `up`."""
    reason: str = ""

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
    address_book = (
        AddressBook.load(address.run_dir / ADDRESS_BOOK_NAME).services if address.run_dir else {}
    )
    for name, process in phases.items():
        known = members.get(name, Member(name=name, state=str(process["phase"])))
        members[name] = with_supervisor_state(
            known, process, address_book[name].address if name in address_book else ""
        )
    reports = await asyncio.gather(*(_report(member) for member in members.values()))
    members = {
        name: replace(member, report=report)
        for (name, member), report in zip(members.items(), reports, strict=True)
    }
    return Membership(view=view, members=dict(sorted(members.items())))


def from_coordinator(replica: ReplicaView) -> Member:
    """A worker as the trainer describes it."""
    return Member(
        name=replica.name,
        state=replica.state.name,
        address=replica.address,
        replica=replica,
        reason=replica.reason,
    )


def with_supervisor_state(member: Member, process: Mapping[str, object], address: str) -> Member:
    """Add the state of the process. One that has ended is OUT, whatever the trainer saw last."""
    phase = str(process["phase"])
    gone = phase in ("drained", "failed")
    return replace(
        member,
        state=ReplicaState.OUT.name if gone else member.state,
        address=address or member.address,
        restarts=int(str(process["restarts"])),
        reason=phase if gone or phase in ("draining", "restarting") else member.reason,
    )


async def _view(trainer: str) -> FleetView | None:
    try:
        return await fetch_fleet(trainer, ANSWER_S)
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


async def _report(member: Member) -> MemberReport | None:
    if member.gone or not member.address:
        return None
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            MemberClient(member.address, retry_s=0.0) as client,
        ):
            return await client.report()
    except (MeshError, TimeoutError):
        return None
