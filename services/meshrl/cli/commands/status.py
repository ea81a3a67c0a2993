"""`meshrl status`: how a running mesh does."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from meshrl.api import HELD_OUT, STEP, RunHistory
from meshrl.cli.find_mesh import RETRY_S, Mesh, ask_fleet, find_mesh, say_which
from meshrl.cli.options import NamedRun, json_option, names_run
from meshrl.common.plain_text import say_json
from meshrl.contract.errors import MeshError, UnavailableError
from meshrl.contract.types import EngineStats, Ledger, RunState, TrainerStatus
from meshrl.launcher.text_console import text_console
from meshrl.launcher.view import clock, ledger_line, sparkline
from meshrl.rpc.clients.services import RolloutClient, TrainerClient
from meshrl.rpc.queue_connection import connect_queue
from meshrl.weights.fleet import FleetView, ReplicaView

ANSWER_S = 10.0
"""A queue that answers later waits for its store, which is then told instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The answers of the services; None where one did not answer."""

    state: RunState
    ledger: Ledger
    trainer: TrainerStatus | None
    fleet: dict[str, EngineStats | None]
    weights: FleetView | None


@click.command()
@names_run(queue=True)
@json_option
def status(named: NamedRun, as_json: bool) -> None:
    """Show steps, rewards, fleet and queue of the mesh of RUN (the newest one here if not given).

    After the end of a mesh: the results of its run.
    """
    if named.queue is None:
        history = RunHistory.read(named.directory)
        if history.state != "running" and history.steps:
            _print_history(history, as_json)
            return
    mesh = find_mesh(named)
    found = asyncio.run(_ask(mesh))
    if as_json:
        say_json(json.dumps(_json(found), indent=2))
    else:
        text_console().print(_table(mesh, found))


def _print_history(history: RunHistory, as_json: bool) -> None:
    directory = history.directory
    say_which(directory, history.name)
    if as_json:
        shown = {"run": history.name, "state": history.state, "steps": history.steps}
        shown |= {"seconds": history.seconds, "samples": history.samples}
        shown |= {"reward": history.last(STEP), "held_out_score": history.last(HELD_OUT)}
        say_json(json.dumps(shown, indent=2))
        return
    table = Table(title=f"run {history.name}", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("state", history.state)
    table.add_row("steps", f"{history.steps:,}")
    for label, metric in (
        ("reward", STEP),
        ("held-out", HELD_OUT),
        ("length", "response/length_mean"),
        ("entropy", "actor/entropy"),
        ("staleness", "staleness/mean"),
    ):
        values = history.values(metric)
        if values:
            ends = f"{values[0]:.3f} → {values[-1]:.3f}"
            table.add_row(label, f"{ends}  {sparkline(values, 32)}")
    table.add_row("samples", f"{history.samples:,}")
    table.add_row("time", f"{clock(history.seconds)}, from the first figures to the last")
    table.add_row("files", str(directory))
    commands = Text(f"meshrl rows {directory}\nmeshrl ledger {directory}")
    table.add_row("more", commands)
    if history.state == "stopped":
        table.add_row("resume", f"meshrl up {directory / 'recipe.yaml'}")
    text_console().print(table)


async def _ask(mesh: Mesh) -> RunStatus:
    async with connect_queue(mesh.queue, retry_s=RETRY_S) as client:
        try:
            async with asyncio.timeout(ANSWER_S):
                state, ledger = await client.run_state(mesh.run), await client.ledger(mesh.run)
        except TimeoutError as error:
            waits = await client.why_waiting(mesh.run)
            why = "; ".join(f"{each.who} waits for {each.what}" for each in waits[:1])
            raise UnavailableError(f"no answer within {ANSWER_S:g} s: {why}") from error
    answers = await asyncio.gather(*(_replica(address) for address in mesh.fleet.values()))
    return RunStatus(
        state=state,
        ledger=ledger,
        trainer=await _trainer(mesh.trainer) if mesh.trainer else None,
        weights=await ask_fleet(mesh.trainer, RETRY_S) if mesh.trainer else None,
        fleet=dict(zip(mesh.fleet, answers, strict=True)),
    )


async def _trainer(address: str) -> TrainerStatus | None:
    async with TrainerClient(address, retry_s=RETRY_S) as client:
        try:
            return await client.status()
        except MeshError:
            return None


async def _replica(address: str) -> EngineStats | None:
    async with RolloutClient(address, retry_s=RETRY_S) as client:
        try:
            return await client.stats()
        except MeshError:
            return None


def _json(found: RunStatus) -> dict[str, Any]:
    trainer = found.trainer
    shown = None
    if trainer is not None:
        staleness = {str(steps): rows for steps, rows in trainer.staleness.items()}
        shown = asdict(trainer) | {"version": str(trainer.version), "staleness": staleness}
    return {
        "run": found.state.spec.run,
        "epoch": found.state.epoch,
        "published": str(found.state.published),
        "feed_closed": found.state.feed_closed,
        "committed_step": found.state.committed_step,
        "trainer": shown,
        "fleet": {
            name: asdict(stats) | {"version": str(stats.version)} if stats else None
            for name, stats in found.fleet.items()
        },
        "weights": {
            view.name: _weights_json(view)
            for view in (found.weights.replicas if found.weights else ())
        },
        "ledger": asdict(found.ledger) | {"balanced": found.ledger.balanced},
    }


def _weights_json(view: ReplicaView) -> dict[str, Any]:
    shown = asdict(view) | {"version": str(view.version) if view.version else None}
    del shown["report"]  # `meshrl fleet` has it
    return shown


def _table(mesh: Mesh, found: RunStatus) -> Table:
    table = Table(title=f"run {mesh.run}", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column()
    trainer = found.trainer
    if trainer is None:
        table.add_row("trainer", "does not answer" if mesh.trainer else "unknown")
    else:
        total = f" of {trainer.total_steps}" if trainer.total_steps else ""
        table.add_row("step", f"{trainer.step}{total} ({trainer.phase})")
        if trainer.waiting_for:
            table.add_row("waits for", trainer.waiting_for)
        for label, value in (("reward", trainer.reward_mean), ("held-out", trainer.held_out_score)):
            if value is not None:
                table.add_row(label, f"{value:.3f}")
        table.add_row("speed", f"{trainer.tokens_per_s:,.0f} tokens/s trained")
        if trainer.eta_s is not None:
            table.add_row("left", f"about {clock(trainer.eta_s)}")
    views = {view.name: view for view in (found.weights.replicas if found.weights else ())}
    for name, stats in found.fleet.items():
        table.add_row(name, _replica_line(stats))
        if name in views:
            table.add_row("", _weights_line(views[name]))
    table.add_row("published", str(found.state.published))
    table.add_row("checkpoint", f"step {found.state.committed_step}")
    table.add_row("ledger", ledger_line(found.ledger))
    return table


def _replica_line(stats: EngineStats | None) -> str:
    if stats is None:
        return "does not answer"
    return (
        f"version {stats.version}, {stats.running}/{stats.capacity} running, "
        f"{stats.tokens_per_s:,.0f} tokens/s"
    )


def _weights_line(view: ReplicaView) -> str:
    if not view.carrier:
        return f"weights: {view.state}"
    reason = f": {view.reason}" if view.reason else ""
    return f"weights: {view.state}{reason} (by {view.carrier}, {view.last_sync_s:.2f} s, paused {view.pause_s:.2f} s)"
