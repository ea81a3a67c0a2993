"""`meshrl reward rescore-run`: scores the rows of a run that wait for the trainer again, with the current version."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Final

import click

from meshrl.cli.find_mesh import find_mesh
from meshrl.cli.options import Finite
from meshrl.common.plain_text import counted, say
from meshrl.contract.ports import Queue
from meshrl.rpc.exit_codes import Exit

TELL_EVERY_S: Final = 1.0
RETRY_S: Final = 30.0
"""Seconds without a scored row after which the command stops waiting; the rows stay scheduled."""
STAGE: Final = "reward"


@click.command("rescore-run")
@click.option("--queue", metavar="HOST:PORT", envvar="MESHRL_QUEUE", help="Needs --run.")
@click.option("--run", metavar="NAME", envvar="MESHRL_RUN", help="The run's name.")
@click.option(
    "--patience",
    type=Finite(min=0),
    default=RETRY_S,
    show_default=True,
    help="Seconds without progress after which to stop watching.",
)
@click.pass_context
def rescore_run(
    context: click.Context, queue: str | None, run: str | None, patience: float
) -> None:
    """Have the run's resident rows that are in no batch scored again; prints progress and rate."""
    run_dir: Path | None = context.obj[0]
    mesh = find_mesh(run_dir, queue, run)
    left = mesh.ask_queue(lambda asked: _rescore(asked, mesh.run, patience))
    if left:
        say(
            f"{counted(left, 'row')} still to be scored, none was in {patience:g} s: left in the queue"
            " (meshrl why-waiting says for what)",
            err=True,
        )
    sys.exit(Exit.FAILED if left else Exit.DONE)


async def _rescore(queue: Queue, run: str, patience: float) -> int:
    """Rows not yet scored after `patience_s` without progress."""
    pending = await _pending(queue, run)  # rows that waited before: do not wait for them
    total = await queue.redo(run, STAGE, ())
    began = moved = time.monotonic()
    left = total
    while left:
        await asyncio.sleep(TELL_EVERY_S)
        now, waiting = time.monotonic(), max(0, await _pending(queue, run) - pending)
        if waiting < left:
            left, moved = waiting, now
        done = total - left
        say(f"{done} of {counted(total, 'row')}, {done / (now - began):.0f} rows/s", err=True)
        if now - moved > patience:
            return left
    say(f"{counted(total, 'row')} scored again in {time.monotonic() - began:.1f} s")
    return 0


async def _pending(queue: Queue, run: str) -> int:
    """Number of answered rows that lack a column."""
    return (await queue.ledger(run)).resident["pending"]
