"""`meshrl dead-letters`: rows that were given up, with what was tried; `replay` admits them again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table

from meshrl.cli.find_mesh import Mesh, find_mesh
from meshrl.cli.options import json_option, mesh_options
from meshrl.common.plain_text import counted, one_line, say, say_json
from meshrl.contract.errors import UserError
from meshrl.contract.ports import Queue
from meshrl.contract.types import DeadLetter, Uid
from meshrl.launcher.text_console import text_console


@click.group("dead-letters", invoke_without_command=True)
@mesh_options
@json_option
@click.pass_context
def dead_letters(
    context: click.Context, run_dir: Path | None, queue: str | None, run: str | None, as_json: bool
) -> None:
    """List the rows that were given up, or `replay` them."""
    mesh = find_mesh(run_dir, queue, run, stopped=True)
    context.obj = mesh
    if context.invoked_subcommand is not None:
        return
    letters = _letters(mesh)
    if as_json:
        shown = [asdict(letter) | {"uid": str(letter.uid)} for letter in letters]
        say_json(json.dumps(shown, indent=2))
    elif not letters:
        say("no row was given up")
    else:
        text_console().print(_table(letters))


@dead_letters.command()
@click.argument("uids", nargs=-1, metavar="[UID]...")
@click.option("--all", "everything", is_flag=True, help="Every dead letter of the run.")
@click.pass_obj
def replay(mesh: Mesh, uids: tuple[str, ...], everything: bool) -> None:
    """Admit dead-lettered rows again, as further attempts."""
    if bool(uids) == everything:
        raise UserError("name the rows to replay (run/task/index.attempt), or give --all")
    try:
        chosen = [Uid.parse(uid) for uid in uids]
    except ValueError as error:
        raise UserError(str(error)) from error
    if everything:
        chosen = [letter.uid for letter in _letters(mesh)]

    async def ask(asked: Queue) -> int:
        return await asked.replay(mesh.run, chosen)

    say(f"{counted(mesh.ask_queue(ask), 'row')} admitted again")


def _letters(mesh: Mesh) -> Sequence[DeadLetter]:
    async def ask(asked: Queue) -> Sequence[DeadLetter]:
        return await asked.dead_letters(mesh.run)

    return mesh.ask_queue(ask)


def _table(letters: Sequence[DeadLetter]) -> Table:
    table = Table()
    for column in ("row", "stage", "outcome", "tries", "reason", "prompt"):
        table.add_column(column)
    for letter in letters:
        table.add_row(
            str(letter.uid),
            letter.stage,
            letter.outcome,
            str(letter.attempts),
            letter.reason,
            one_line(letter.prompt),
        )
    return table
