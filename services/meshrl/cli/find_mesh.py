"""Finds the mesh that a command is about; where it does not run, opens the files of its queue or raises."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from meshrl.cli.options import NamedRun
from meshrl.common.files import check_owner
from meshrl.common.plain_text import say
from meshrl.common.sockets import check_address, trust_network
from meshrl.config.loading import load_run
from meshrl.config.recipe import EVAL_SUFFIX, METRICS_NAME, Recipe
from meshrl.contract.errors import MeshError, NotFoundError, UnavailableError, UserError
from meshrl.contract.ports import Queue
from meshrl.contract.types import Ledger, Waiting
from meshrl.launcher.address_book import (
    ADDRESS_BOOK_NAME,
    AddressBook,
    is_up,
    run_lock,
)
from meshrl.launcher.control import ask_up
from meshrl.launcher.observer import fleet_waits
from meshrl.rpc import credentials, tls
from meshrl.rpc.credentials import MeshRole
from meshrl.rpc.queue_connection import connect_queue, open_stored_queue
from meshrl.weights.fleet import FleetView, ReplicaReport, ReplicaState, ReplicaView, fetch_fleet

TAIL_BYTES = 1 << 16
"""More than the longest line of metrics.jsonl."""
TRAINER_VARIABLE = "MESHRL_TRAINER"
RETRY_S = 5.0
"""How long a command tries a service that does not answer."""
ANSWER_S = 3.0
"""How long the trainer and `up` are asked for the workers."""
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The addresses of a mesh, or the recipe of one that does not run."""

    run: str
    queue: str
    trainer: str | None = None
    fleet: Mapping[str, str] = field(default_factory=dict)
    """Rollout workers by name."""
    stopped: Recipe | None = None
    """The recipe of a mesh that does not run: its queue's files answer."""

    @property
    def runs(self) -> tuple[str, str]:
        """Training and evaluation."""
        return self.run, self.run + EVAL_SUFFIX

    async def ledgers(self, queue: Queue) -> list[Ledger]:
        """The ledger of training, and that of evaluation once something was evaluated."""
        found = [await queue.ledger(self.run)]
        with suppress(NotFoundError):
            found.append(await queue.ledger(self.runs[1]))
        return found

    async def waits(self, queue: Queue) -> list[Waiting]:
        """All that waits in both, and the workers that cannot sample: the longest wait first."""
        found = list(await queue.why_waiting(self.run))
        found += await fleet_waits(self.trainer, self.fleet)
        with suppress(NotFoundError):
            found += await queue.why_waiting(self.runs[1])
        return sorted(found, key=lambda wait: -wait.since_s)

    def ask_queue(self, question: Callable[[Queue], Awaitable[Answer]]) -> Answer:
        """Ask the running queue, or the one on disk."""

        async def ask() -> Answer:
            async with self.open_queue() as queue:
                return await question(queue)

        return asyncio.run(ask())

    @asynccontextmanager
    async def open_queue(self, retry_s: float = RETRY_S) -> AsyncIterator[Queue]:
        """The running queue, which is tried for `retry_s`, or the one on disk."""
        if self.stopped is not None:
            with run_lock(self.stopped.run.path):
                async with open_stored_queue(self.stopped) as left:
                    yield left
        else:
            async with connect_queue(self.queue, retry_s=retry_s) as queue:
                yield queue


def find_mesh(named: NamedRun, *, stopped: bool = False) -> Mesh:
    """The mesh of a run, with `stopped` also one that does not run.

    The trainer of a mesh that is named by its queue is where MESHRL_TRAINER says.

    Raises:
        UserError: the run has no name at its queue, whose address is none, or its directory holds no mesh.
        NotFoundError: no mesh was ever started here.
        UnavailableError: there is one, and it does not run now.
    """
    if named.queue is not None:
        if named.name is None:
            raise UserError("--queue needs the run's name: a queue may serve several runs")
        queue = check_address(named.queue)
        return Mesh(run=named.name, queue=queue, trainer=os.environ.get(TRAINER_VARIABLE))
    directory = named.directory
    address_book = AddressBook.load(directory / ADDRESS_BOOK_NAME)
    if stopped or is_up(directory):
        say_which(directory, address_book.run)
    mesh = mesh_of(directory, stopped=stopped)
    return mesh if named.name is None else replace(mesh, run=named.name)


def mesh_of(directory: Path, *, stopped: bool = False, role: MeshRole = MeshRole.OPERATOR) -> Mesh:
    """The mesh of `directory`, called with the credential of `role`; with `stopped` also one that does not run.

    Raises:
        NotFoundError, UnavailableError: as `find_mesh`.
    """
    address_book = AddressBook.load(directory / ADDRESS_BOOK_NAME)
    if stopped and not is_up(directory):
        recipe = load_run(address_book.recipe)
        if recipe.queue.store == "disk" and not recipe.queue_path.exists():
            raise NotFoundError(f"{recipe.queue_path}: the run has no queue there any more")
        return Mesh(run=address_book.run, queue="", stopped=recipe)
    _enter(directory, address_book, role)
    return Mesh(
        run=address_book.run,
        queue=address_book.address("queue"),
        trainer=address_book.address("trainer"),
        fleet={name: entry.address for name, entry in address_book.of_kind("rollout").items()},
    )


def _enter(directory: Path, address_book: AddressBook, role: MeshRole = MeshRole.OPERATOR) -> None:
    """Call the services of `directory` with its certificates and the credential of `role` from now on.

    Raises:
        UnavailableError: it does not run. ConfigError: it is another user's, who says where credentials are shown.
    """
    check_owner(directory, "the run's directory")
    if not is_up(directory):
        raise UnavailableError(
            f"the mesh in {directory} is not running; start it with: meshrl up {address_book.recipe}"
        )
    tls.use(load_run(address_book.recipe).tls.certificates)
    if address_book.trusted_network:
        trust_network()
    credentials.use_run_directory(directory, role)


def say_which(directory: Path, run: str) -> None:
    """Tell a person which run and step the answer is about, on stderr: stdout is for the answer."""
    step = last_step(directory / METRICS_NAME)
    state = "" if is_up(directory) else ", not running"
    made = "no step yet" if step is None else f"step {step}"
    say(f"run {run} in {directory}: {made}{state}", err=True)


def last_step(metrics: Path) -> int | None:
    """The step of the last whole line of metrics.jsonl; None before the first."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return None


def reward_address(named: NamedRun, address: str | None) -> str:
    """The address of the reward service: `address`, or as the mesh of the run says.

    Raises:
        NotFoundError: no mesh was ever started here. UnavailableError: it does not run now.
    """
    if address is not None:
        return address
    directory = named.directory
    address_book = AddressBook.load(directory / ADDRESS_BOOK_NAME)
    _enter(directory, address_book)
    say_which(directory, address_book.run)
    return address_book.address("reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAddress:
    """The `up` of a directory, or a trainer anywhere."""

    trainer: str
    run_dir: Path | None = None
    """None where no `up` of ours runs the mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMember:
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
    members: Mapping[str, FleetMember] = field(default_factory=dict)


async def read_membership(address: MeshAddress) -> Membership:
    """Ask all of them. Raises UnavailableError when none knows of a fleet."""
    view, phases = await asyncio.gather(
        ask_fleet(address.trainer, ANSWER_S), _phases(address.run_dir)
    )
    if view is None and not phases:
        raise UnavailableError(f"the trainer at {address.trainer} does not answer")
    members = {replica.name: from_coordinator(replica) for replica in view.replicas} if view else {}
    for name, process in phases.items():
        known = members.get(name, FleetMember(name=name, state=str(process["phase"])))
        members[name] = with_supervisor_state(known, process)
    return Membership(view=view, members=dict(sorted(members.items())))


def from_coordinator(replica: ReplicaView) -> FleetMember:
    """A worker as the trainer describes it."""
    return FleetMember(
        name=replica.name,
        state=replica.state.name,
        replica=replica,
        reason=replica.reason,
    )


def with_supervisor_state(member: FleetMember, process: Mapping[str, object]) -> FleetMember:
    """Add the state of the process. One that has ended is OUT, whatever the trainer saw last."""
    phase = str(process["phase"])
    gone = phase in ("drained", "failed")
    return replace(
        member,
        state=ReplicaState.OUT.name if gone else member.state,
        restarts=int(str(process["restarts"])),
        reason=phase if gone or phase in ("draining", "restarting") else member.reason,
    )


async def ask_fleet(trainer: str, answer_s: float) -> FleetView | None:
    """The fleet as the trainer sees it; None where it does not answer."""
    try:
        return await fetch_fleet(trainer, answer_s)
    except UserError:  # it cannot be asked like this
        raise
    except MeshError:
        return None


async def _phases(run_dir: Path | None) -> Mapping[str, Mapping[str, object]]:
    if run_dir is None:
        return {}
    try:
        answer = await ask_up(run_dir, "members", timeout_s=ANSWER_S)
    except MeshError:
        return {}
    return {name: state for name, state in answer.items() if isinstance(state, dict)}
