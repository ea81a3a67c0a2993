"""`meshrl runs` lists the runs here, from their files only, and those that a queue stores."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from meshrl.api import HELD_OUT, STEP, RunHistory
from meshrl.cli.find_mesh import find_mesh
from meshrl.cli.operator import ask_operator
from meshrl.cli.options import PATH, NamedRun, json_option, names_run, run_at
from meshrl.common.plain_text import say, say_json
from meshrl.contract.errors import UserError
from meshrl.contract.types import StoredRun
from meshrl.launcher.text_console import text_console
from meshrl.launcher.view import clock

TOLD = (
    STEP,
    HELD_OUT,
    "response/length_mean",
    "actor/entropy",
    "staleness/mean",
    "throughput/tokens_per_s",
)
"""Metrics whose newest values `--json` has."""
ANY = "-"
"""No run in particular."""


class _ListsByDefault(click.Group):
    """A group whose command `list` need not be named: `meshrl runs`, `meshrl runs FOLDER`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `list` before words that begin with no command."""
        named = args and (args[0] in self.commands or args[0] in ("--help", "-h"))
        return super().parse_args(ctx, args if named else ["list", *args])


@click.group(cls=_ListsByDefault)
def runs() -> None:
    """List the runs in a folder (`list`, which need not be named), or what a queue stores; remove a run from it."""


@runs.command("list")
@click.argument("folder", type=PATH, default=Path("runs"))
@json_option
def list_(folder: Path, as_json: bool) -> None:
    """List the runs in FOLDER, the newest last."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such directory; want one with a directory per run")
    found = [RunHistory.read(path) for path in sorted(folder.iterdir()) if run_at(path) == path]
    found.sort(key=lambda run: run.ended_unix_s or 0.0)
    if as_json:
        say_json(json.dumps([_json(run) for run in found], indent=2))
        return
    if not found:
        say(f"no run in {folder}")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("run", overflow="fold")
    for name in ("state", "steps", "reward", "held-out", "time", "last step"):
        table.add_column(name, no_wrap=True, justify="left" if name == "state" else "right")
    for run in found:
        when = run.ended_unix_s
        table.add_row(
            Text(run.directory.name),
            run.state,
            f"{run.steps:,}",
            _number(run.last(STEP)),
            _number(run.last(HELD_OUT)),
            clock(run.seconds),
            datetime.fromtimestamp(when).strftime("%m-%d %H:%M") if when else "",
        )
    text_console().print(table)


@runs.command()
@names_run(queue=True)
@json_option
def stored(named: NamedRun, as_json: bool) -> None:
    """List the runs that the queue of RUN (the newest one here) stores, and which of them services work on."""
    mesh = find_mesh(replace(named, name=ANY), stopped=True)
    found = ask_operator(mesh, lambda admin: admin.runs(), of_runs=True)
    if as_json:
        say_json(json.dumps([_stored_json(one) for one in found], indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("run", overflow="fold")
    for name in ("opened by", "checkpoint", "admitted", "resident"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("worked on")
    for one in found:
        table.add_row(
            Text(one.run),
            Text(one.opened_by or "–"),
            f"step {one.committed_step:,}",
            f"{one.ledger.admitted:,}",
            f"{sum(one.ledger.resident.values()):,}",
            Text(one.attached[0] if one.attached else "no"),
        )
    text_console().print(table)


@runs.command()
@names_run(queue=True, behind="name")
@click.option("--force", is_flag=True, help="Also while services work on it: they end, or wait.")
@json_option
def remove(named: NamedRun, name: str, force: bool, as_json: bool) -> None:
    """Remove the run NAME, which is over or abandoned, from the queue of RUN: its rows, at once or not at all.

    Other runs, and checkpoints, trajectories and metrics of this one, stay as they are.
    """
    path = named.path if named.path is not None else run_at(Path(name))
    mesh = find_mesh(replace(named, path=path, name=name), stopped=True)
    gone = ask_operator(mesh, lambda admin: admin.remove_run(name, force=force), of_runs=True)
    if as_json:
        say_json(json.dumps(_stored_json(gone), indent=2))
        return
    say(f"run {name} is removed from the queue; lost: {gone.loss}")
    if gone.committed_step:
        say(
            f"its checkpoint of step {gone.committed_step} stays; trained on, it is fed from the first prompt"
        )


def _stored_json(run: StoredRun) -> dict[str, object]:
    return {**asdict(run), "run": run.run, "lost": run.loss}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"


def _json(run: RunHistory) -> dict[str, object]:
    return {
        "directory": str(run.directory),
        "run": run.name,
        "state": run.state,
        "steps": run.steps,
        "seconds": run.seconds,
        "last_unix_s": run.ended_unix_s,
        "last": {metric: run.last(metric) for metric in TOLD},
    }
