"""The `up` command: lock the run's directory, plan, supervise, show, and say at the end what came of it."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial

from rich.console import Console
from rich.live import Live

from meshrl.config.loading import save_recipe
from meshrl.config.recipe import Recipe
from meshrl.contract.types import TrainerStatus
from meshrl.launcher.address_book import BOOK_NAME, run_lock
from meshrl.launcher.control import control_door
from meshrl.launcher.fleet import Fleet
from meshrl.launcher.health import health_probe
from meshrl.launcher.logs import MergedLog
from meshrl.launcher.observer import Observer
from meshrl.launcher.plan import LaunchPlan
from meshrl.launcher.shards import Shards, grown
from meshrl.launcher.status import Board
from meshrl.launcher.supervisor import Supervisor, Verdict
from meshrl.launcher.view import final_table, live_view, step_line, waiting_lines
from meshrl.rpc import tls

REDRAW_S = 0.25
STEP_LINE_S = 3.0
"""Between two lines of progress: small models make several steps a second."""
WAITING_LINE_S = 30.0
RECIPE_NAME = "recipe.yaml"
SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


def up(recipe: Recipe, *, fixed_ports: Mapping[str, int], plain: bool) -> int:
    """Run the mesh of `recipe` to its end; the exit code.

    Raises:
        UserError: the run's directory is in use, or `fixed_ports` names no service.
    """
    tls.use(recipe.tls.certificates)
    recipe = grown(recipe)
    directory = recipe.run.path
    directory.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True)
    with run_lock(directory):
        save_recipe(recipe, directory / RECIPE_NAME)
        plan = LaunchPlan(recipe, directory / RECIPE_NAME, directory / BOOK_NAME, fixed_ports)
        verdict, board = asyncio.run(_supervise(recipe, plan, console, plain))
    board.recall(recipe.metrics_path)
    files = {
        "checkpoints": str(recipe.checkpoint_dir),
        "metrics": str(recipe.metrics_path),
        "logs": str(directory / "logs"),
    }
    console.print(final_table(board, files))
    if not verdict.finished:
        print(f"error: {verdict.line}", file=sys.stderr)
    return verdict.code


async def _supervise(
    recipe: Recipe, plan: LaunchPlan, console: Console, plain: bool
) -> tuple[Verdict, Board]:
    services = plan.services(health_probe)
    names = [service.name for service in services]
    with MergedLog(recipe.run.path / "logs", names, console) as log:
        # The observer reads the supervisor's states, and the supervisor asks the observer for a last look.
        supervisor = Supervisor(services, log, before_drain=lambda: observer.last_look())
        board = Board(run=recipe.run.name, states=supervisor.states)
        live = console.is_terminal and not plain

        told = -STEP_LINE_S

        def on_step(status: TrainerStatus) -> None:
            nonlocal told
            if not live and board.elapsed_s - told >= STEP_LINE_S:
                told = board.elapsed_s
                log("up", step_line(board, status))

        observer = Observer(board, lambda: plan.book, on_step)
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, partial(_on_signal, supervisor, board, log, number))
        log("up", f"run {recipe.run.name}: {', '.join(names)}; files in {recipe.run.path}")
        showing = _live(board, console) if live else _lines(board, log)
        fleet = Fleet(plan, supervisor, health_probe, partial(log, "up"))
        shards = Shards(recipe, plan, supervisor, health_probe, partial(log, "up"))
        door = control_door(recipe.run.path, {**fleet.verbs, **shards.verbs})
        async with observer.observing(), showing, door:
            verdict = await supervisor.run()
    return verdict, board


def _on_signal(
    supervisor: Supervisor, board: Board, log: MergedLog, number: signal.Signals
) -> None:
    step = board.trainer.step if board.trainer else 0
    line = f"stopped by {SIGNALS[number]} at step {step}; the same command goes on from there"
    if not supervisor.stopping:
        log("up", f"{SIGNALS[number]}: draining, the trainer first; once more kills at once")
    supervisor.stop(line, 128 + number)


@asynccontextmanager
async def _live(board: Board, console: Console) -> AsyncIterator[None]:
    """Redraw while the body runs; the log scrolls above."""
    with Live(console=console, auto_refresh=False, transient=True) as live:

        async def redraw() -> None:
            while True:
                live.update(live_view(board), refresh=True)
                await asyncio.sleep(REDRAW_S)

        async with _beside(redraw()):
            yield


@asynccontextmanager
async def _lines(board: Board, log: MergedLog) -> AsyncIterator[None]:
    """Steps are lines already; only a trainer that is stuck needs more."""

    async def explain() -> None:
        while True:
            await asyncio.sleep(WAITING_LINE_S)
            for line in waiting_lines(board):
                log("up", f"the trainer waits: {line}")

    async with _beside(explain()):
        yield


@asynccontextmanager
async def _beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run a coroutine for as long as the body runs."""
    task = asyncio.create_task(work, name="up-view")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
