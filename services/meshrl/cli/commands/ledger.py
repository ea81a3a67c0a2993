"""`meshrl ledger`: where every admitted row is, and whether it adds up."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click
from rich.console import Group
from rich.live import Live
from rich.table import Table

from meshrl.cli.commands.queue import tell_audit
from meshrl.cli.find_mesh import Mesh, find_mesh
from meshrl.cli.operator import ask_operator, audit_of
from meshrl.cli.options import json_option, mesh_options
from meshrl.common.plain_text import say_json
from meshrl.config.recipe import EVAL_SUFFIX
from meshrl.contract.errors import NotFoundError, UserError
from meshrl.contract.ports import Queue
from meshrl.contract.types import Ledger
from meshrl.launcher.text_console import text_console
from meshrl.rpc.exit_codes import Exit
from meshrl.transferqueue.operations.audit import Audit

WATCH_EVERY_S: Final = 1.0


@click.command()
@mesh_options
@json_option
@click.option(
    "--audit",
    "audited",
    is_flag=True,
    help="Derive it anew from every stored row and value, and compare.",
)
@click.option("--watch", is_flag=True, help="Show it again each second, until Ctrl-C.")
def ledger(
    run_dir: Path | None,
    queue: str | None,
    run: str | None,
    as_json: bool,
    audited: bool,
    watch: bool,
) -> None:
    """Account for every row of the run and of its evaluation, also when it has ended; exit code 1 if it is off."""
    if audited and watch:
        raise UserError("--audit reads everything that is stored: not with --watch")
    mesh = find_mesh(run_dir, queue, run, stopped=True)
    if watch:
        _watch(mesh, as_json)
    if audited:
        found = ask_operator(mesh, audit_of)
        ledgers = [found.ledgers[name] for name in mesh.runs if name in found.ledgers]
    else:
        found = None
        ledgers = _ledgers(mesh)
    _show(ledgers, as_json, found)
    off = found.problems if found else not all(one.balanced for one in ledgers)
    sys.exit(Exit.FAILED if off else Exit.DONE)


def _ledgers(mesh: Mesh) -> list[Ledger]:
    """Of the run, and of its evaluation if there was one."""

    async def ask(asked: Queue) -> list[Ledger]:
        found = [await asked.ledger(mesh.run)]
        try:
            found.append(await asked.ledger(mesh.runs[1]))
        except NotFoundError:
            # Nothing was evaluated yet.
            return found
        return found

    return mesh.ask_queue(ask)


def _show(ledgers: Sequence[Ledger], as_json: bool, audited: Audit | None) -> None:
    if as_json:
        shown: dict[str, object] = {
            one.run: asdict(one) | {"balanced": one.balanced} for one in ledgers
        }
        if audited is not None:
            shown = {"ledgers": shown, "problems": audited.problems}
        say_json(json.dumps(shown, indent=2))
        return
    for one in ledgers:
        text_console().print(_table(one))
    if audited is not None:
        tell_audit(audited)


def _watch(mesh: Mesh, as_json: bool) -> None:
    """Until Ctrl-C: one table in place, or one line of JSON a second."""
    if as_json:
        while True:
            say_json(json.dumps({one.run: asdict(one) for one in _ledgers(mesh)}))
            time.sleep(WATCH_EVERY_S)
    with Live(console=text_console(), auto_refresh=False) as live:
        while True:
            live.update(Group(*map(_table, _ledgers(mesh))), refresh=True)
            time.sleep(WATCH_EVERY_S)


def _table(one: Ledger) -> Table:
    title = f"{one.run}: {'balanced' if one.balanced else 'NOT BALANCED'}"
    table = Table(title=title, title_justify="left")
    table.add_column("rows")
    table.add_column("why")
    table.add_column("count", justify="right")
    for at, (label, why, count) in enumerate(ledger_rows(one)):
        table.add_row(label, why, f"{count:,}", end_section=at == 0)
    return table


def ledger_rows(one: Ledger) -> list[tuple[str, str, int]]:
    """Where rows are, why, how many; those admitted first. What is held out is scored, not trained on."""
    done = "scored" if one.run.endswith(EVAL_SUFFIX) else "trained"
    rows = [("admitted", "", one.admitted), (done, "", one.trained)]
    for label, counts in (
        ("filtered", one.filtered),
        ("stale", one.stale),
        ("dead-lettered", one.dead_lettered),
        ("resident", one.resident),
    ):
        rows += [(label, why, count) for why, count in sorted(counts.items())]
    return rows
