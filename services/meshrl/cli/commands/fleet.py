"""`meshrl fleet`: who belongs to the rollout fleet; one more, one less."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import click
from rich.live import Live
from rich.table import Table

from meshrl.cli.find_mesh import (
    ANSWER_S,
    FleetMember,
    Membership,
    MeshAddress,
    find_mesh,
    read_membership,
)
from meshrl.cli.options import NamedRun, RunGroup, json_option, names_run
from meshrl.common.plain_text import say, say_json
from meshrl.common.sockets import trusts_network
from meshrl.contract.errors import UserError
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, AddressBook
from meshrl.launcher.control import ask_up
from meshrl.launcher.text_console import text_console
from meshrl.weights.fleet import drain_replica

WATCH_EVERY_S = 1.0
DRAIN_S = 60.0
"""A member has half of this to drain before it is killed."""
ADD_S = 10.0
PLAIN_WIDTH = 160
"""Columns of the table where the output is a pipe and `COLUMNS` is not set."""
COLUMNS = (
    "member",
    "state",
    "version",
    "carrier",
    "running",
    "tokens/s",
    "errors",
    "breaker",
    "last sync",
    "reason",
)
SPARED = ("last sync", "carrier", "breaker", "errors", "tokens/s", "running")
"""Columns that a narrow terminal does without, the first one first."""
REASON_WIDTH = 12
"""Columns kept for the reason, which is broken into lines."""


@click.group(cls=RunGroup, invoke_without_command=True)
@names_run(word=False)
@click.option(
    "--trainer",
    metavar="HOST:PORT",
    envvar="MESHRL_TRAINER",
    help="Ask this trainer: for a mesh that no `meshrl up` on this machine runs.",
)
@json_option
@click.option("--watch", is_flag=True, help="Show it again each second, until Ctrl-C.")
@click.pass_context
def fleet(
    context: click.Context, named: NamedRun, trainer: str | None, as_json: bool, watch: bool
) -> None:
    """List the rollout workers of the mesh of RUN (the newest one here if not given), or `add` and `drain` some."""
    context.obj = partial(
        _mesh_address, named, trainer
    )  # found when a command runs, not for its --help
    if context.invoked_subcommand is not None:
        return
    address = context.obj()
    if watch:
        _watch(address, as_json)
    membership = asyncio.run(read_membership(address))
    if as_json:
        say_json(json.dumps(membership_json(membership), indent=2))
    else:
        known = sys.stdout.isatty() or "COLUMNS" in os.environ
        console = text_console(width=None if known else PLAIN_WIDTH)
        console.print(fleet_table(membership, console.width))


@fleet.command()
@click.argument("name")
@click.pass_obj
def drain(find: Callable[[], MeshAddress], name: str) -> None:
    """Have the worker NAME hand over what it runs and leave; its supervisor does not start it again.

    Responses that run are kept in the queue, and other workers continue them.
    """
    address = find()
    members = asyncio.run(read_membership(address)).members
    member = members.get(name)
    if member is None:
        raise UserError(
            f"this mesh has no rollout worker {name!r} (it has: {', '.join(members) or 'none'})"
        )
    if member.gone:
        say(f"{name} has left already")
    elif member.supervised and address.run_dir is not None:
        reply = asyncio.run(ask_up(address.run_dir, "drain", timeout_s=DRAIN_S, name=name))
        how = "has left" if reply["in_time"] else "did not drain in time and was killed"
        say(f"{name} {how}; {reply['left']} of this `up` remain")
        if not reply["left"]:
            say("warning: training waits until a worker is added: meshrl fleet add")
    else:
        asyncio.run(drain_replica(address.trainer, name, ANSWER_S))
        say(f"{name} hands over what it runs and ends; what started it must let it be")


@fleet.command()
@click.option("--count", type=click.IntRange(1, 64), default=1, show_default=True)
@click.option("--print", "printed", is_flag=True, help="Say how to start one on another machine.")
@click.option(
    "--queue",
    metavar="HOST:PORT",
    envvar="MESHRL_QUEUE",
    help="Address of the queue, with --trainer.",
)
@click.option("--recipe", default="RECIPE", help="The recipe on the other machine, with --trainer.")
@click.pass_obj
def add(
    find: Callable[[], MeshAddress], count: int, printed: bool, queue: str | None, recipe: str
) -> None:
    """Start more rollout workers of a running `meshrl up`; for a mesh elsewhere, print the commands that do."""
    address = find()
    if address.run_dir is not None and not printed:
        reply = asyncio.run(ask_up(address.run_dir, "add", timeout_s=ADD_S, count=count))
        names = reply["added"]
        assert isinstance(names, list)
        verb = "starts" if len(names) == 1 else "start"
        say(f"{', '.join(names)} {verb}; `meshrl fleet` shows when it serves")
        return
    if address.run_dir is not None:
        address_book = AddressBook.load(address.run_dir / ADDRESS_BOOK_NAME)
        queue, recipe = address_book.address("queue"), str(address_book.recipe)
    elif queue is None:
        raise UserError("--trainer alone does not tell where the queue is: give --queue HOST:PORT")
    for name in _free_names(asyncio.run(read_membership(address)), count):
        words = ["meshrl", "serve", "rollout", recipe, "--name", name]
        words += ["--queue", str(queue), "--trainer", address.trainer]
        if trusts_network():
            words.append("--allow-insecure-bind")
        say(shlex.join(words))


def _mesh_address(named: NamedRun, trainer: str | None) -> MeshAddress:
    if trainer is not None:
        if named.path is not None:
            raise UserError("RUN and --trainer are two ways to find a mesh: give one")
        return MeshAddress(trainer=trainer)
    mesh = find_mesh(named)
    assert mesh.trainer is not None
    return MeshAddress(trainer=mesh.trainer, run_dir=named.directory)


def _free_names(membership: Membership, count: int) -> list[str]:
    """`rollout-N` with numbers beyond those in use."""
    taken = [name.removeprefix("rollout-") for name in membership.members]
    first = 1 + max((int(number) for number in taken if number.isdigit()), default=-1)
    return [f"rollout-{number}" for number in range(first, first + count)]


def _watch(address: MeshAddress, as_json: bool) -> None:
    """Print one table in place, or one line of JSON a second, until Ctrl-C."""
    if as_json:
        while True:
            say_json(json.dumps(membership_json(asyncio.run(read_membership(address)))))
            time.sleep(WATCH_EVERY_S)
    console = text_console()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            membership = asyncio.run(read_membership(address))
            live.update(fleet_table(membership, console.width), refresh=True)
            time.sleep(WATCH_EVERY_S)


def membership_json(membership: Membership) -> dict[str, Any]:
    """The output of `--json`."""
    view = membership.view
    return {
        "run": view.run if view else None,
        "committed": str(view.committed) if view and view.committed else None,
        "proposed": str(view.proposed) if view and view.proposed else None,
        "members": [_member_json(member) for member in membership.members.values()],
    }


def _member_json(member: FleetMember) -> dict[str, Any]:
    replica, report = member.replica, member.report
    shown: dict[str, Any] = {
        "name": member.name,
        "state": member.state,
        "version": str(replica.version) if replica and replica.version else None,
        "carrier": replica.carrier if replica else None,
        "last_sync_s": replica.last_sync_s if replica else None,
        "pause_s": replica.pause_s if replica else None,
        "moved_bytes": replica.moved_bytes if replica else None,
        "reason": member.reason,
        "restarts": member.restarts,
        "answers": report is not None,
    }
    if report is not None:
        worker, engine = report.worker, report.engine
        shown |= {
            "running": engine.running,
            "capacity": engine.capacity,
            "slots": worker.slots,
            "held": worker.held,
            "tokens_per_s": engine.tokens_per_s,
            "error_rate": worker.error_rate,
            "breaker": worker.breaker,
            "opened": worker.opened,
            "last_fault": worker.last_fault,
            "draining": worker.draining,
            "containers": worker.boxes,
            "waits_for": worker.waits_for,
            "leased": worker.rows.leased,
            "written": worker.rows.written,
            "failed": worker.rows.failed,
            "returned": worker.rows.returned,
            "lost": worker.rows.lost,
            "continued_tokens": worker.continued,
        }
    return shown


def fleet_table(membership: Membership, width: int) -> Table:
    """A row per worker; names are never cut: columns that do not fit into `width` are left out (`SPARED`)."""
    view = membership.view
    title = f"run {view.run}, version {view.committed}" if view else "the trainer does not answer"
    members = [
        dict(zip(COLUMNS, _cells(member), strict=True)) for member in membership.members.values()
    ]
    needs = {
        name: 2 + max(len(name), *(len(member[name]) for member in members), 0)
        for name in COLUMNS[:-1]
    }
    for name in SPARED:
        if sum(needs.values()) + REASON_WIDTH > width:
            del needs[name]
    table = Table(title=title, title_justify="left", box=None)
    for name in needs:
        table.add_column(name, no_wrap=True, overflow="fold")
    table.add_column(COLUMNS[-1])
    for member in members:
        table.add_row(*(member[name] for name in needs), member[COLUMNS[-1]])
    return table


def _cells(member: FleetMember) -> list[str]:
    replica, report = member.replica, member.report
    version = str(replica.version) if replica and replica.version else "–"
    carrier = (replica.carrier if replica else "") or "–"
    sync = f"{replica.last_sync_s:.2f} s" if replica and replica.last_sync_s else "–"
    if report is None:
        silent = "" if member.gone else "no report"
        middle, reason = ["–"] * 4, member.reason or silent
    else:
        engine, worker = report.engine, report.worker
        middle = [
            f"{engine.running}/{min(engine.capacity, worker.slots)}",
            f"{engine.tokens_per_s:,.0f}",
            f"{worker.error_rate:.0%}",
            worker.breaker,
        ]
        fault = worker.last_fault if worker.error_rate else ""
        waits = f"waits for {worker.waits_for}" if worker.waits_for else ""
        reason = "draining" if worker.draining else (member.reason or fault or waits)
    return [member.name, member.state, version, carrier, *middle, sync, reason]
