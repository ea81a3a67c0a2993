"""`meshrl queue`: copies of what a queue stores, and whether it is what it should be; one more shard."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path

import click

from meshrl.cli.find_mesh import RETRY_S, find_mesh
from meshrl.cli.operator import (
    Operator,
    ask_operator,
    ask_store,
    merged,
    shards_of,
    verify_all,
)
from meshrl.cli.options import PATH, RUN, json_option, mesh_options, overrides_argument
from meshrl.client.connection import check_address
from meshrl.config.loading import load_recipe
from meshrl.contract.errors import ConflictError, UserError
from meshrl.contract.words import counted
from meshrl.launcher.address_book import newest_run_dir, run_lock
from meshrl.launcher.control import ask_up
from meshrl.rpc.exit_codes import Exit
from meshrl.rpc.queue_connection import build_store, connect_queue
from meshrl.transferqueue.operations.audit import Audit
from meshrl.transferqueue.operations.backup import Copied, back_up, opened, restore_backup
from meshrl.transferqueue.sharding import ShardedQueue

ADD_SHARD_S = 120.0
"""For a process to start, and for shards that restart meanwhile."""


@click.group()
def queue() -> None:
    """Back up, restore and verify what a queue stores; add a shard."""


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
    shards = shards_of(mesh)
    parts = [folder / f"queue-{number}" for number in range(shards)] if shards > 1 else [folder]

    async def copy(operator: Operator, number: int) -> Copied:
        async with aclosing(operator.export()) as pieces:
            return await back_up(pieces, parts[number])

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

    parts = _shards_in(folder)
    if len(parts) != wanted.queue.shards:
        raise UserError(
            f"{folder} holds {len(parts)} shards of a queue and queue.shards is {wanted.queue.shards}:"
            " a backup goes into as many as it came from"
        )

    async def fill() -> list[Copied]:
        copied: list[Copied] = []
        for number, part in enumerate(parts):
            store = build_store(wanted, number)
            try:
                copied.append(await restore_backup(part, store))
            finally:
                await store.close()
        return copied

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
        found = merged(asyncio.run(_verify(_shards_in(folder))))
    else:
        found = verify_all(find_mesh(run_dir, queue, run, stopped=True))
    if as_json:
        ledgers = {
            name: asdict(one) | {"balanced": one.balanced} for name, one in found.ledgers.items()
        }
        click.echo(json.dumps({**asdict(found), "ledgers": ledgers}, indent=2))
    else:
        tell_audit(found)
    sys.exit(Exit.FAILED if found.problems else Exit.DONE)


@queue.command("add-shard")
@click.argument("address", metavar="[HOST:PORT]", required=False)
@click.option(
    "--run-dir",
    type=RUN,
    envvar="MESHRL_RUN_DIR",
    help="The directory of a running `meshrl up`; the newest runs/*/mesh.json if not given.",
)
@click.option(
    "--queue",
    "addresses",
    metavar="HOST:PORT",
    envvar="MESHRL_QUEUE",
    help="With HOST:PORT: the shards that there are, separated by commas.",
)
def add_shard(address: str | None, run_dir: Path | None, addresses: str | None) -> None:
    """Add a process to a queue of several while its runs go on: a running `meshrl up` starts and adds it.

    For a mesh without `up`, start one more first (meshrl serve queue RECIPE queue.shards=N+1 --name queue-N), then
    give its HOST:PORT and with --queue the shards that there are. Groups stay where they are, new ones go to all.
    """
    if address is None:
        directory = run_dir if run_dir is not None else newest_run_dir()
        find_mesh(directory, None, None)  # says what is wrong where no mesh runs
        reply = asyncio.run(ask_up(directory, "add-shard", timeout_s=ADD_SHARD_S))
        click.echo(
            f"{reply['added']} is added: the queue has {counted(int(str(reply['shards'])), 'shard')}"
        )
        return
    check_address(address)
    if addresses is None or "," not in addresses:
        raise UserError(
            "give the shards that there are with --queue, two at least: a queue of one process gets shards"
            " only at a start, with queue.shards=2 and both addresses"
        )
    number = asyncio.run(_add_shard(addresses, address))
    click.echo(
        f"{address} is shard {number}: new groups go to it as well, others stay where they are"
    )


async def _add_shard(addresses: str, address: str, *, retry_s: float = RETRY_S) -> int:
    """Its number. A shard that does not answer is tried for `retry_s`."""
    async with connect_queue(addresses, retry_s=retry_s) as queue:
        assert isinstance(queue, ShardedQueue)
        return await queue.add_shard(address)


def tell_audit(found: Audit) -> None:
    """One line, or one a problem."""
    for problem in found.problems:
        click.echo(problem)
    rows = sum(sum(one.resident.values()) for one in found.ledgers.values())
    click.echo(
        f"{counted(len(found.problems), 'problem') if found.problems else 'no problems'}:"
        f" {counted(len(found.ledgers), 'run')},"
        f" {counted(rows, 'resident row')}, {counted(found.records, 'record')},"
        f" {counted(found.values, 'payload value')}, {counted(found.nbytes, 'byte')}"
    )


def _shards_in(folder: Path) -> list[Path]:
    """Where the backup of each shard is: FOLDER itself for a single one."""
    found = [part for part in folder.glob("queue-*") if part.name[6:].isdecimal()]
    return sorted(found, key=lambda part: int(part.name[6:])) or [folder]


async def _verify(folders: Sequence[Path]) -> list[Audit]:
    async def ask(operator: Operator) -> Audit:
        return await operator.verify()

    return [await ask_store(opened(folder), ask) for folder in folders]


def _tell_copied(what: str, parts: Sequence[Copied], as_json: bool) -> None:
    copied = Copied(
        records=sum(part.records for part in parts),
        values=sum(part.values for part in parts),
        nbytes=sum(part.nbytes for part in parts),
    )
    if as_json:
        click.echo(json.dumps(asdict(copied)))
    else:
        click.echo(
            f"{what}: {counted(copied.records, 'record')}, {counted(copied.values, 'payload value')},"
            f" {counted(copied.nbytes, 'byte')}"
        )
