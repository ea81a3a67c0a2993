"""Defaults that follow from the device: what a recipe leaves unsaid means another thing on a GPU than on a CPU.

A pure function of the recipe, the machine and what the run had before. What a recipe names stays as it is, and on a
machine without GPUs so does everything else, except that a run continues with the types it began with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from meshrl.common import bounded_yaml
from meshrl.config.machine import ThisMachine
from meshrl.config.recipe import RECIPE_NAME, Recipe, names
from meshrl.contract.errors import UserError

SERVER_ENVIRONMENT = Path(".venv-vllm/bin/python")
"""The environment of a vLLM beside this one, as `make` names it."""


def with_device_defaults(recipe: Recipe, machine: ThisMachine) -> Recipe:
    """The recipe as this machine runs it: compute type, type on the wire, engine."""
    before = _types_before(recipe, machine)
    cuda = trains_on_cuda(recipe, machine)
    compute = before.get("param_dtype") or ("bfloat16" if cuda else None)
    if compute and not names(recipe.model, "param_dtype"):
        recipe = _with(recipe, "model", param_dtype=compute)
    wire = before.get("dtype") or (recipe.model.param_dtype if cuda else None)
    if wire and not names(recipe.weights, "dtype"):
        recipe = _with(recipe, "weights", dtype=wire)
    return _with_engine(recipe, machine)


def trains_on_cuda(recipe: Recipe, machine: ThisMachine) -> bool:
    """Whether the trainer computes on a GPU, as far as this machine can tell."""
    return bool(machine.gpus) and recipe.trainer.device != "cpu" and recipe.placement.trainer != 0


def hints(recipe: Recipe, machine: ThisMachine) -> Iterator[str]:
    """Hints at faster choices, where the recipe leaves them open."""
    if machine.gpus and not names(recipe.rollout, "name") and recipe.placement.rollout != 0:
        yield (
            "rollout.name: torch, for no vLLM is known: it has neither a paged cache nor tensor parallelism; install"
            " vLLM in an environment of its own and set rollout.name=vllm rollout.engine.python=ITS/bin/python"
        )


def _with_engine(recipe: Recipe, machine: ThisMachine) -> Recipe:
    rollout = recipe.rollout
    open_choice = not names(rollout, "name") and not names(rollout, "engine")
    if not machine.gpus or not open_choice or recipe.placement.rollout == 0:
        return recipe
    if machine.told_of("vllm"):
        return _with(recipe, "rollout", name="vllm")
    if not machine.elsewhere and machine.program(str(SERVER_ENVIRONMENT)):
        engine = {"python": str(SERVER_ENVIRONMENT.absolute())}
        return _with(recipe, "rollout", name="vllm", engine=engine)
    return recipe


def _types_before(recipe: Recipe, machine: ThisMachine) -> Mapping[str, Any]:
    """`param_dtype` and `dtype` of the run that this one continues with; none for one that begins."""
    names = machine.names(recipe.checkpoint_dir)
    if recipe.trainer.resume_mode != "auto" or not any(n.startswith("step-") for n in names):
        return {}
    path = recipe.run.path / RECIPE_NAME
    try:
        found = bounded_yaml.load(machine.text(path)) if machine.is_file(path) else {}
        return {
            "param_dtype": found.get("model", {}).get("param_dtype"),
            "dtype": found.get("weights", {}).get("dtype"),
        }
    except (UserError, yaml.YAMLError, AttributeError):
        return {}


def _with(recipe: Recipe, section: str, **values: object) -> Recipe:
    changed = getattr(recipe, section).model_copy(update=values)
    return recipe.model_copy(update={section: changed})
