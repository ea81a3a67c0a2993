"""Files that `up` finds and leaves in a run's directory: the accepted recipe, and the note that it is finished."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from meshrl.common.files import replace_file
from meshrl.config.loading import anchored, save_recipe
from meshrl.config.recipe import RECIPE_NAME, RUNNING_NAME, Recipe, uses_gateway
from meshrl.launcher.address_book import is_taken

if TYPE_CHECKING:
    from meshrl.launcher.view import MeshStatus

FINISHED_NAME = "finished.json"
EXPORT_NAME = "export"
HOST = "127.0.0.1"


class RecipeOnTrial:
    """The recipe of a start: services read `running`; `accepted` is the run's own, and changes with `accept` only."""

    def __init__(self, directory: Path) -> None:
        self.running = directory / RUNNING_NAME
        self.accepted = directory / RECIPE_NAME

    def save(self, recipe: Recipe) -> None:
        """Let services that start from here on read `recipe`."""
        save_recipe(anchored(recipe), self.running)

    def accept(self) -> None:
        """Make what the services read the recipe of the run; not while the disk is full, which must not end it."""
        with suppress(OSError):
            replace_file(self.accepted, self.running.read_bytes())


@contextmanager
def recipe_on_trial(recipe: Recipe, directory: Path) -> Iterator[RecipeOnTrial]:
    """Save `recipe` for the services to read; the run keeps its own until this one is accepted, also after a kill.

    A start that the run's queue, data or checkpoint refuses must not change what the run is said to be.
    """
    trial = RecipeOnTrial(directory)
    trial.save(recipe)
    if not trial.accepted.exists():
        trial.accept()
    try:
        yield trial
    finally:
        trial.running.unlink(missing_ok=True)


def busy_port(recipe: Recipe, fixed: Mapping[str, int]) -> str | None:
    """A sentence about the first port on which another program listens: of the given ones and those of the recipe."""
    given = ((f"--port {name}", HOST, port) for name, port in fixed.items())
    for key, host, port in itertools.chain(given, _ports_of(recipe)):
        if is_taken(host, port):
            return f"{key}={port}: another program listens on {host}:{port}; choose another port"
    return None


def _ports_of(recipe: Recipe) -> Iterator[tuple[str, str, int]]:
    """Key, host and port of what services of this machine will listen on besides gRPC; 0 lets them choose."""
    yield "reward.registry.http_port", HOST, recipe.reward.registry.http_port or 0
    yield "weights.port", recipe.weights.host, recipe.weights.port
    if recipe.tinker is not None:
        yield "tinker.http_port", HOST, recipe.tinker.http_port
    gateway = recipe.rollout.gateway
    if gateway.port and uses_gateway(recipe):
        for port in range(gateway.port, gateway.port + recipe.rollout.workers):
            yield "rollout.gateway.port", gateway.host, port


def note_finished(recipe: Recipe, mesh_status: MeshStatus) -> None:
    """Note that the run did all that `recipe` asks for, and what came of it."""
    directory, ledger = recipe.run.path, mesh_status.ledger
    note = {
        "run": recipe.run.name,
        "step": mesh_status.step,
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "reward": next(reversed(mesh_status.rewards.values()), None),
        "held_out_score": next(reversed(mesh_status.scores.values()), None),
        "trained_rows": ledger.trained if ledger else None,
        "balanced": ledger.balanced if ledger else None,
        "model": EXPORT_NAME if (directory / EXPORT_NAME).is_dir() else None,
        "length": _length(recipe),
    }
    replace_file(directory / FINISHED_NAME, json.dumps(note, indent=2) + "\n")


def finished_line(recipe: Recipe) -> str | None:
    """A sentence about a run that is finished and is not asked for more; None when there is something to do."""
    if recipe.trainer.resume_mode != "auto" or not any(recipe.checkpoint_dir.glob("step-*")):
        return None
    try:
        note = json.loads((recipe.run.path / FINISHED_NAME).read_text())
        if note["length"] != _length(recipe):
            return None
        step = int(note["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (
        f"run {recipe.run.name} is finished at step {step}; files in {recipe.run.path}: to train on, raise"
        " trainer.total_training_steps (or trainer.total_epochs); to start anew, choose another run.name or remove"
        " the directory"
    )


def _length(recipe: Recipe) -> dict[str, object]:
    """The keys that say how long a run is."""
    return {
        "trainer.total_training_steps": recipe.trainer.total_training_steps,
        "trainer.total_epochs": recipe.trainer.total_epochs,
    }
