"""`meshrl why-waiting`: what blocks now, since when, and where: from the queue and the rollout workers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table

from meshrl.cli.find_mesh import find_mesh
from meshrl.cli.options import json_option, mesh_options
from meshrl.common.plain_text import say, say_json
from meshrl.contract.errors import NotFoundError
from meshrl.contract.ports import Queue
from meshrl.contract.types import Waiting
from meshrl.launcher.fleet_waits import fleet_waits
from meshrl.launcher.text_console import text_console

SHOWN_UIDS = 4


@click.command("why-waiting")
@mesh_options
@json_option
def why_waiting(run_dir: Path | None, queue: str | None, run: str | None, as_json: bool) -> None:
    """List everything that waits in the queue, the longest wait first, and the workers that cannot sample."""
    mesh = find_mesh(run_dir, queue, run)

    async def ask(asked: Queue) -> list[Waiting]:
        found = list(await asked.why_waiting(mesh.run))
        found += await fleet_waits(mesh.trainer, mesh.fleet)
        try:
            found += await asked.why_waiting(mesh.runs[1])
        except NotFoundError:
            # Nothing was evaluated yet.
            return found
        return sorted(found, key=lambda wait: -wait.since_s)

    waits = mesh.ask_queue(ask)
    if as_json:
        shown = [asdict(wait) | {"uids": [str(uid) for uid in wait.uids]} for wait in waits]
        say_json(json.dumps(shown, indent=2))
    elif not waits:
        say("nothing waits")
    else:
        text_console().print(_table(waits))


def _table(waits: list[Waiting]) -> Table:
    table = Table()
    for column in ("who", "waits for", "since", "ask", "rows"):
        table.add_column(column)
    for wait in waits:
        rows = ", ".join(str(uid) for uid in wait.uids[:SHOWN_UIDS])
        if len(wait.uids) > SHOWN_UIDS:
            rows += f", ... ({len(wait.uids)} in all)"
        table.add_row(wait.who, wait.what, f"{wait.since_s:.1f} s", ", ".join(wait.owners), rows)
    return table
