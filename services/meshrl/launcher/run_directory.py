"""What `up` finds and leaves in a run's directory: the recipe that was accepted, and that the run is finished."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from meshrl.config.loading import anchored, save_recipe
from meshrl.config.recipe import Recipe
from meshrl.contract.files import replace_file
from meshrl.launcher.ports import is_free

FINISHED_NAME = "finished.json"
HOST = "127.0.0.1"


@contextmanager
def recipe_on_trial(recipe: Recipe, path: Path) -> Iterator[Callable[[], None]]:
    """Save `recipe` for the services to read; unless the given function is called, the one before comes back.

    A start that the run's queue, data or checkpoint refuses must not change what the run is said to be.
    """
    before = path.read_bytes() if path.exists() else None
    accepted = False

    def accept() -> None:
        nonlocal accepted
        accepted = True

    save_recipe(anchored(recipe), path)
    try:
        yield accept
    finally:
        if not accepted and before is not None:
            replace_file(path, before)


def busy_port(fixed: Mapping[str, int]) -> str | None:
    """What to say of the first of the given ports on which another program listens."""
    for name, port in fixed.items():
        if not is_free(HOST, port):
            return f"--port {name}={port}: another program listens on {HOST}:{port}; choose another port"
    return None


def note_finished(recipe: Recipe, step: int) -> None:
    """Note that the run did all that `recipe` asks for."""
    note = {"step": step, "length": _length(recipe)}
    replace_file(recipe.run.path / FINISHED_NAME, json.dumps(note, indent=2) + "\n")


def finished_line(recipe: Recipe) -> str | None:
    """What to say of a run that is finished and is not asked for more; None when there is something to do."""
    if recipe.trainer.resume_mode != "auto" or not any(recipe.checkpoint_dir.glob("*")):
        return None
    try:
        note = json.loads((recipe.run.path / FINISHED_NAME).read_text())
        if note["length"] != _length(recipe):
            return None
        step = int(note["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (
        f"run {recipe.run.name} is finished at step {step}; files in {recipe.run.path}\n"
        "To train on, raise trainer.total_training_steps (or trainer.total_epochs); to start anew, choose another"
        " run.name or remove the directory."
    )


def _length(recipe: Recipe) -> dict[str, object]:
    """What says how long a run is."""
    return {
        "trainer.total_training_steps": recipe.trainer.total_training_steps,
        "trainer.total_epochs": recipe.trainer.total_epochs,
    }
