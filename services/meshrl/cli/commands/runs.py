"""`meshrl runs` lists the runs here; `meshrl compare` puts two beside each other. Both read files only."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from meshrl.api.history import HELD_OUT, STEP, RunHistory
from meshrl.cli.options import PATH, RUN, json_option
from meshrl.cli.plain_text import text_console
from meshrl.config.recipe import METRICS_NAME, RECIPE_NAME
from meshrl.contract.errors import UserError
from meshrl.http.view.settings import compared
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME
from meshrl.launcher.view import clock, sparkline

COMPARED = {
    "reward": STEP,
    "held-out score": HELD_OUT,
    "length": "response/length_mean",
    "entropy": "actor/entropy",
    "staleness": "staleness/mean",
    "tokens/s": "throughput/tokens_per_s",
}
"""What is shown to the metric that it is."""
NOT_COMPARED = ("run.name", "run.dir")
SPARK = 20
MARKS = (ADDRESS_BOOK_NAME, METRICS_NAME)
"""A directory with one of these is a run's."""


@click.command()
@click.argument("folder", type=PATH, default=Path("runs"))
@json_option
def runs(folder: Path, as_json: bool) -> None:
    """List the runs in FOLDER, the newest last."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such directory; want one with a directory per run")
    found = [
        RunHistory.read(path)
        for path in sorted(folder.iterdir())
        if any((path / mark).exists() for mark in MARKS)
    ]
    found.sort(key=lambda run: run.ended_unix_s or 0.0)
    if as_json:
        click.echo(json.dumps([_json(run) for run in found], indent=2))
        return
    if not found:
        click.echo(f"no run in {folder}")
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


@click.command()
@click.argument("run", type=RUN)
@click.argument("other", type=RUN)
@json_option
def compare(run: Path, other: Path, as_json: bool) -> None:
    """Show where the figures and the recipes of two runs, given by their directories, differ."""
    for path in (run, other):
        if not any((path / mark).exists() for mark in MARKS):
            raise UserError(f"{path}: no run's directory (it has no {' and no '.join(MARKS)})")
    both = [RunHistory.read(run), RunHistory.read(other)]
    entries = compared(run, other) if (run / RECIPE_NAME).exists() else []
    keys = {
        entry["key"]: (entry["value"], entry["other"])
        for entry in entries
        if entry["differs"] and entry["key"] not in NOT_COMPARED
    }
    if as_json:
        click.echo(json.dumps({"runs": [_json(one) for one in both], "recipe": keys}, indent=2))
        return
    table = Table(header_style="dim")
    table.add_column("")
    for one in both:
        table.add_column(Text(str(one.directory)), overflow="fold")
    table.add_row("state", *(one.state for one in both))
    table.add_row("steps", *(f"{one.steps:,}" for one in both))
    table.add_row("time", *(clock(one.seconds) for one in both))
    for name, metric in COMPARED.items():
        curves = [one.values(metric) for one in both]
        if any(curves):
            table.add_row(name, *(_curve(values) for values in curves))
    for key, (own, others) in keys.items():
        shown = (Text("(default)" if value is None else value) for value in (own, others))
        table.add_row(Text(key), *shown)
    text_console().print(table)


def _curve(values: list[float]) -> str:
    if not values:
        return ""
    return f"{_number(values[0])} → {_number(values[-1])}  {sparkline(values, SPARK)}"


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
        "last": {metric: run.last(metric) for metric in COMPARED.values()},
    }
