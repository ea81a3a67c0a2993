"""`meshrl ledger`, `why-waiting`, `dead-letters` and `queue`: where rows are, what they wait for, and copies."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import asdict
from operator import methodcaller
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Group
from rich.live import Live
from rich.table import Table

from meshrl.cli.find_mesh import Mesh, find_mesh
from meshrl.cli.operator import ask_operator, ask_store
from meshrl.cli.options import (
    PATH,
    NamedRun,
    RunGroup,
    json_option,
    names_run,
    overrides_argument,
    run_at,
)
from meshrl.common.files import make_private
from meshrl.common.plain_text import counted, one_line, say, say_json
from meshrl.config.loading import load_recipe
from meshrl.config.recipe import EVAL_SUFFIX
from meshrl.contract.errors import ConflictError, UserError
from meshrl.contract.types import Audit, DeadLetter, Ledger, Uid, Waiting
from meshrl.launcher.address_book import newest_run_dir, run_lock
from meshrl.launcher.text_console import text_console
from meshrl.rpc.exit_codes import Exit
from meshrl.rpc.queue_connection import build_store
from meshrl.trainer.hosted import FOLDER, MODELS
from meshrl.transferqueue.admin import Copied, back_up, opened, restore_backup

WATCH_EVERY_S: Final = 1.0
SHOWN_UIDS = 4


@click.group()
def queue() -> None:
    """Back up, restore and verify what a queue stores, or a server of models that callers train, which is stopped."""


@queue.command()
@names_run(queue=True, behind="folder")
@json_option
def backup(named: NamedRun, folder: str, as_json: bool) -> None:
    """Copy all that the queue of RUN stores, as of one moment, to FOLDER on this machine; the run continues."""
    target = Path(folder)
    if target.exists():
        raise ConflictError(f"{folder} exists: a backup never overwrites anything")
    if (models := _models(named)) is not None:
        _copy_models(f"backed up to {folder}", models, target, as_json)
        return
    mesh = find_mesh(named, stopped=True)

    async def copy(asked: Any) -> Copied:
        async with aclosing(asked.export()) as pieces:
            return await back_up(pieces, target)

    copied = ask_operator(mesh, copy)
    _tell_copied(f"backed up to {folder}", copied, as_json)


@queue.command()
@click.argument("folder", type=PATH)
@click.argument("recipe", type=PATH)
@overrides_argument
@json_option
def restore(folder: Path, recipe: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Fill the queue of RECIPE, which must be empty and not running, from the backup in FOLDER."""
    wanted = load_recipe(recipe, overrides, check=False, hub=False)

    async def fill() -> Copied:
        store = build_store(wanted)
        try:
            return await restore_backup(folder, store)
        finally:
            await store.close()

    make_private(wanted.run.path, "run.dir")
    with run_lock(wanted.run.path):
        if (folder / MODELS).is_dir():
            told = f"restored {folder} for run {wanted.run.name}"
            _copy_models(told, folder, wanted.run.path / FOLDER, as_json)
            return
        copied = asyncio.run(fill())
    _tell_copied(f"restored {folder} for run {wanted.run.name}", copied, as_json)


@queue.command()
@names_run(queue=True)
@json_option
def verify(named: NamedRun, as_json: bool) -> None:
    """Check every stored value and derive the ledger anew, of RUN or a backup's folder; exit code 1 if it is off."""
    if (models := _models(named)) is not None:
        sys.exit(_tell_models("", models, as_json))
    folder = named.path
    if named.queue is None and folder is not None and run_at(folder) is None:
        found = asyncio.run(ask_store(opened(folder), methodcaller("verify")))
    else:
        found = ask_operator(find_mesh(named, stopped=True), methodcaller("verify"))
    if as_json:
        shown = {**asdict(found), "ledgers": _ledgers_json(found.ledgers.values())}
        say_json(json.dumps(shown, indent=2))
    else:
        tell_audit(found)
    sys.exit(Exit.FAILED if found.problems else Exit.DONE)


def _models(named: NamedRun) -> Path | None:
    """The folder of callers' models, of a run that serves them or of a backup; None: it is a queue's."""
    if named.queue is not None:
        return None
    folder = named.path or newest_run_dir()
    places = (folder, (run_at(folder) or folder) / FOLDER)
    return next((place for place in places if (place / MODELS).is_dir()), None)


def _copy_models(what: str, source: Path, target: Path, as_json: bool) -> None:
    from meshrl.trainer.hosted.audit import copy  # with it comes torch

    copy(source, target)
    sys.exit(_tell_models(f"{what}: ", target, as_json))


def _tell_models(what: str, folder: Path, as_json: bool) -> Exit:
    from meshrl.trainer.hosted.audit import audit

    found = audit(folder)
    if as_json:
        say_json(json.dumps(asdict(found), indent=2))
    else:
        told = _told(found.problems)
        say(
            f"{what}{told}: {counted(found.models, 'model')}, {counted(found.requests, 'request')},"
            f" {found.unanswered:,} to be done, {counted(found.checkpoints, 'checkpoint')},"
            f" {counted(found.nbytes, 'byte')}"
        )
    return Exit.FAILED if found.problems else Exit.DONE


def _told(problems: Sequence[str]) -> str:
    """Say each problem on a line; how many they are."""
    for problem in problems:
        say(problem)
    return counted(len(problems), "problem") if problems else "no problems"


def tell_audit(found: Audit) -> None:
    """One line, or one a problem."""
    told = _told(found.problems)
    rows = sum(sum(one.resident.values()) for one in found.ledgers.values())
    say(
        f"{told}: {counted(len(found.ledgers), 'run')},"
        f" {counted(rows, 'resident row')}, {counted(found.records, 'record')},"
        f" {counted(found.values, 'payload value')}, {counted(found.nbytes, 'byte')}"
    )


def _tell_copied(what: str, copied: Copied, as_json: bool) -> None:
    if as_json:
        say_json(json.dumps(asdict(copied)))
    else:
        say(
            f"{what}: {counted(copied.records, 'record')}, {counted(copied.values, 'payload value')},"
            f" {counted(copied.nbytes, 'byte')}"
        )


@click.command()
@names_run(queue=True)
@json_option
@click.option(
    "--audit",
    "audited",
    is_flag=True,
    help="Derive it anew from every stored row and value, and compare.",
)
@click.option("--watch", is_flag=True, help="Show it again each second, until Ctrl-C.")
def ledger(named: NamedRun, as_json: bool, audited: bool, watch: bool) -> None:
    """Account for every row of RUN (the newest one here if not given) and of its evaluation, also when it has ended.

    The exit code is 1 if the ledger is off.
    """
    if audited and watch:
        raise UserError("--audit reads everything that is stored: not with --watch")
    mesh = find_mesh(named, stopped=True)
    if watch:
        _watch(mesh, as_json)
    if audited:
        found = ask_operator(mesh, methodcaller("verify"))
        ledgers = [found.ledgers[name] for name in mesh.runs if name in found.ledgers]
    else:
        found = None
        ledgers = mesh.ask_queue(mesh.ledgers)
    _show(ledgers, as_json, found)
    off = found.problems if found else not all(one.balanced for one in ledgers)
    sys.exit(Exit.FAILED if off else Exit.DONE)


def _show(ledgers: Sequence[Ledger], as_json: bool, audited: Audit | None) -> None:
    if as_json:
        shown = _ledgers_json(ledgers)
        if audited is not None:
            shown = {"ledgers": shown, "problems": audited.problems}
        say_json(json.dumps(shown, indent=2))
        return
    for one in ledgers:
        text_console().print(_ledger_table(one))
    if audited is not None:
        tell_audit(audited)


def _ledgers_json(ledgers: Iterable[Ledger]) -> dict[str, object]:
    return {one.run: asdict(one) | {"balanced": one.balanced} for one in ledgers}


def _watch(mesh: Mesh, as_json: bool) -> None:
    """Print one table in place, or one line of JSON a second, until Ctrl-C."""
    if as_json:
        while True:
            say_json(json.dumps(_ledgers_json(mesh.ask_queue(mesh.ledgers))))
            time.sleep(WATCH_EVERY_S)
    with Live(console=text_console(), auto_refresh=False) as live:
        while True:
            tables = map(_ledger_table, mesh.ask_queue(mesh.ledgers))
            live.update(Group(*tables), refresh=True)
            time.sleep(WATCH_EVERY_S)


def _ledger_table(one: Ledger) -> Table:
    title = f"{one.run}: {'balanced' if one.balanced else 'NOT BALANCED'}"
    table = Table(title=title, title_justify="left")
    table.add_column("rows")
    table.add_column("why")
    table.add_column("count", justify="right")
    for at, (label, why, count) in enumerate(ledger_rows(one)):
        table.add_row(label, why, f"{count:,}", end_section=at == 0)
    return table


def ledger_rows(one: Ledger) -> list[tuple[str, str, int]]:
    """State, reason and number of rows; the admitted ones first. Held-out rows are scored, not trained."""
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


@click.command("why-waiting")
@names_run(queue=True)
@json_option
def why_waiting(named: NamedRun, as_json: bool) -> None:
    """List all that waits in the queue of RUN, the longest wait first, and the workers that cannot sample."""
    mesh = find_mesh(named)
    waits = mesh.ask_queue(mesh.waits)
    if as_json:
        shown = [asdict(wait) | {"uids": [str(uid) for uid in wait.uids]} for wait in waits]
        say_json(json.dumps(shown, indent=2))
    elif not waits:
        say("nothing waits")
    else:
        text_console().print(_waits_table(waits))


def _waits_table(waits: list[Waiting]) -> Table:
    table = Table()
    for column in ("who", "waits for", "since", "ask", "rows"):
        table.add_column(column)
    for wait in waits:
        rows = ", ".join(str(uid) for uid in wait.uids[:SHOWN_UIDS])
        if len(wait.uids) > SHOWN_UIDS:
            rows += ", ..."
        table.add_row(wait.who, wait.what, f"{wait.since_s:.1f} s", ", ".join(wait.owners), rows)
    return table


@click.group("dead-letters", cls=RunGroup, invoke_without_command=True)
@names_run(queue=True, word=False)
@json_option
@click.pass_context
def dead_letters(context: click.Context, named: NamedRun, as_json: bool) -> None:
    """List the rows of RUN that were given up, or `replay` them."""
    mesh = find_mesh(named, stopped=True)
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
        text_console().print(_letters_table(letters))


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
    admitted = mesh.ask_queue(methodcaller("replay", mesh.run, chosen))
    say(f"{counted(admitted, 'row')} admitted again")


def _letters(mesh: Mesh) -> Sequence[DeadLetter]:
    return mesh.ask_queue(methodcaller("dead_letters", mesh.run))


def _letters_table(letters: Sequence[DeadLetter]) -> Table:
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
