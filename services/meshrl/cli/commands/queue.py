"""`meshrl queue`: copies of what a queue stores, and whether it is what it should be."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path

import click

from meshrl.cli.find_mesh import find_mesh
from meshrl.cli.operator import Operator, ask_operator, ask_store, audit_of
from meshrl.cli.options import PATH, json_option, mesh_options, overrides_argument
from meshrl.common.plain_text import counted, say, say_json
from meshrl.config.loading import load_recipe
from meshrl.contract.errors import ConflictError
from meshrl.launcher.address_book import run_lock
from meshrl.rpc.exit_codes import Exit
from meshrl.rpc.queue_connection import build_store
from meshrl.transferqueue.operations.audit import Audit
from meshrl.transferqueue.operations.backup import Copied, back_up, opened, restore_backup


@click.group()
def queue() -> None:
    """Back up, restore and verify what a queue stores."""


@queue.command()
@click.argument("folder", type=PATH)
@mesh_options
@json_option
def backup(
    folder: Path, run_dir: Path | None, queue: str | None, run: str | None, as_json: bool
) -> None:
    """Copy everything that the queue stores, as of one moment, to FOLDER on this machine; it goes on meanwhile."""
    if folder.exists():
        raise ConflictError(f"{folder} exists: a backup never overwrites anything")
    mesh = find_mesh(run_dir, queue, run, stopped=True)

    async def copy(asked: Operator) -> Copied:
        async with aclosing(asked.export()) as pieces:
            return await back_up(pieces, folder)

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

    wanted.run.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with run_lock(wanted.run.path):
        copied = asyncio.run(fill())
    _tell_copied(f"restored {folder} for run {wanted.run.name}", copied, as_json)


@queue.command()
@click.argument("folder", type=PATH, required=False)
@mesh_options
@json_option
def verify(
    folder: Path | None, run_dir: Path | None, queue: str | None, run: str | None, as_json: bool
) -> None:
    """Check every stored value and derive the ledger anew, of a backup or of a mesh; exit code 1 if it is off."""
    if folder is not None:
        found = asyncio.run(ask_store(opened(folder), audit_of))
    else:
        found = ask_operator(find_mesh(run_dir, queue, run, stopped=True), audit_of)
    if as_json:
        ledgers = {
            name: asdict(one) | {"balanced": one.balanced} for name, one in found.ledgers.items()
        }
        say_json(json.dumps({**asdict(found), "ledgers": ledgers}, indent=2))
    else:
        tell_audit(found)
    sys.exit(Exit.FAILED if found.problems else Exit.DONE)


def tell_audit(found: Audit) -> None:
    """One line, or one a problem."""
    for problem in found.problems:
        say(problem)
    rows = sum(sum(one.resident.values()) for one in found.ledgers.values())
    say(
        f"{counted(len(found.problems), 'problem') if found.problems else 'no problems'}:"
        f" {counted(len(found.ledgers), 'run')},"
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
