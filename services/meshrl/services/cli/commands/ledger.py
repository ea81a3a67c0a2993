"""`meshrl ledger`: where every admitted row is, and whether it adds up."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from meshrl.contract.errors import NotFoundError
from meshrl.contract.nouns import Ledger
from meshrl.contract.ports import Queue
from meshrl.services.cli.mesh import find_mesh
from meshrl.services.cli.options import json_option, mesh_options
from meshrl.services.up.exits import Exit


@click.command()
@mesh_options
@json_option
def ledger(run_dir: Path | None, queue: str | None, run: str | None, as_json: bool) -> None:
    """Account for every row of the run and of its evaluation, also when it has ended; exit code 1 if it is off."""
    mesh = find_mesh(run_dir, queue, run, stopped=True)

    async def ask(asked: Queue) -> list[Ledger]:
        found = [await asked.ledger(mesh.run)]
        try:
            found.append(await asked.ledger(mesh.runs[1]))
        except NotFoundError:
            # Nothing was evaluated yet.
            return found
        return found

    ledgers = mesh.ask_queue(ask)
    if as_json:
        shown = {one.run: asdict(one) | {"balanced": one.balanced} for one in ledgers}
        click.echo(json.dumps(shown, indent=2))
    else:
        for one in ledgers:
            Console(highlight=False).print(_table(one))
    sys.exit(Exit.DONE if all(one.balanced for one in ledgers) else Exit.FAILED)


def _table(one: Ledger) -> Table:
    title = f"{one.run}: {'balanced' if one.balanced else 'NOT BALANCED'}"
    table = Table(title=title, title_justify="left")
    table.add_column("rows")
    table.add_column("why")
    table.add_column("count", justify="right")
    table.add_row("admitted", "", f"{one.admitted:,}", end_section=True)
    table.add_row("trained", "", f"{one.trained:,}")
    for label, counts in (
        ("filtered", one.filtered),
        ("stale", one.stale),
        ("dead-lettered", one.dead_lettered),
        ("resident", one.resident),
    ):
        for why, count in sorted(counts.items()):
            table.add_row(label, why, f"{count:,}")
    return table
