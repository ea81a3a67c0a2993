"""The fleet from all who know something of it: the trainer's weight plane, the members themselves, the supervisor.

    plane   who belongs to it, at which version          (trainer's address)
    members what they run and how their engines fare      (the addresses that they gave, or the book's)
    up      which processes it started, and which left    (its control socket, on this machine only)

Each is asked once, within ANSWER_S; what one of them does not tell is shown as unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshrl.contract.errors import MeshError, UnavailableError
from meshrl.launcher.address_book import BOOK_NAME, AddressBook
from meshrl.launcher.control import Answer, ask_up
from meshrl.rpc.clients.member import MemberClient, MemberReport
from meshrl.weights.fleet import FleetView, ReplicaState, ReplicaView, fetch_fleet

ANSWER_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Whom to ask: the `up` of a directory, or a trainer anywhere."""

    trainer: str
    run_dir: Path | None = None
    """None where no `up` of ours runs the mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rollout worker."""

    name: str
    state: str
    """JOINING, SYNCED, SERVING, SUSPECT, OUT; or what its supervisor says while no plane knows it."""
    address: str = ""
    replica: ReplicaView | None = None
    """As the trainer sees it."""
    report: MemberReport | None = None
    """As it sees itself; None when it does not answer."""
    restarts: int | None = None
    """None where no supervisor of ours keeps it."""
    reason: str = ""

    @property
    def gone(self) -> bool:
        """It has left, or died."""
        return self.state == ReplicaState.OUT.name

    @property
    def kept_by_up(self) -> bool:
        """True for a process of `up`."""
        return self.restarts is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """The fleet at one instant."""

    view: FleetView | None
    """None when the trainer does not answer."""
    members: Mapping[str, Member] = field(default_factory=dict)


async def call_roll(site: Site) -> Roster:
    """Ask everybody. Raises UnavailableError when nobody knows of a fleet."""
    view, phases = await asyncio.gather(_view(site.trainer), _phases(site.run_dir))
    if view is None and not phases:
        raise UnavailableError(f"the trainer at {site.trainer} does not answer")
    members = {replica.name: seen_by_plane(replica) for replica in view.replicas} if view else {}
    book = AddressBook.load(site.run_dir / BOOK_NAME).services if site.run_dir else {}
    for name, told in phases.items():
        known = members.get(name, Member(name=name, state=str(told["phase"])))
        members[name] = kept_by_supervisor(known, told, book[name].address if name in book else "")
    reports = await asyncio.gather(*(_report(member) for member in members.values()))
    members = {
        name: replace(member, report=report)
        for (name, member), report in zip(members.items(), reports, strict=True)
    }
    return Roster(view=view, members=dict(sorted(members.items())))


def seen_by_plane(replica: ReplicaView) -> Member:
    """A worker as the trainer tells of it."""
    return Member(
        name=replica.name,
        state=replica.state.name,
        address=replica.address,
        replica=replica,
        reason=replica.reason,
    )


def kept_by_supervisor(member: Member, told: Mapping[str, object], address: str) -> Member:
    """What the supervisor adds: it knows why a process went, and one that went is out whatever the plane saw last."""
    phase = str(told["phase"])
    gone = phase in ("drained", "failed")
    return replace(
        member,
        state=ReplicaState.OUT.name if gone else member.state,
        address=address or member.address,
        restarts=int(str(told["restarts"])),
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
        told: Answer = await ask_up(run_dir, "members", timeout_s=ANSWER_S)
    except MeshError:
        return {}
    return {name: state for name, state in told.items() if isinstance(state, dict)}


async def _report(member: Member) -> MemberReport | None:
    if member.gone or not member.address:
        return None
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            MemberClient(member.address, retry_s=0.0) as wire,
        ):
            return await wire.report()
    except (MeshError, TimeoutError):
        return None
