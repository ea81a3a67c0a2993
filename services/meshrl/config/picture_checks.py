"""Checks of a recipe with a vision-language model: parts for text only, and unsupported models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshrl.common.checks import Problem
from meshrl.config.machine import ThisMachine
from meshrl.config.recipe import Recipe, algorithm_needs, session_options

PICTURE_ENGINES = ("vllm", "sglang")
"""Others are given rows of text only, whatever the model reads."""
PICTURE_PROGRAMS = ("single_turn", "tools", "user", "openai")
"""Built-in programs that hand a task's pictures to the engine."""
PICTURE_PACKAGES = {"PIL": "pillow", "msgpack": "msgpack"}


def check_pictures(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    """Parts that read text only, of a recipe with a vision-language model, and packages that it lacks."""
    program, seen = recipe.rollout.program, recipe.rollout.name in PICTURE_ENGINES
    if seen and program not in PICTURE_PROGRAMS and "." not in program:
        yield (
            ("rollout", "program"),
            f"rollout.program: {program} loses the pictures of a prompt; want {', '.join(PICTURE_PROGRAMS)}",
        )
    if seen and session_options(recipe).get("branch") == "each":
        yield (
            ("rollout", "program_options"),
            "rollout.program_options.branch: each trains text only; want last, longest or only",
        )
    yield from _read_alike(recipe, machine)
    for dimension in ("tensor", "expert"):
        if getattr(recipe.parallel, dimension) > 1:
            key = f"trainer.parallel.{dimension}"
            yield (
                ("trainer", "parallel", dimension),
                f"{key}: a vision-language model is not sharded so; want 1",
            )
    for package, distribution in PICTURE_PACKAGES.items():
        if not machine.installed(package):
            yield ("model",), f"model: pictures need {distribution}: pip install 'meshrl[vision]'"


def _read_alike(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    """Whether the models beside the policy, where the recipe names some, make the same tokens of a picture."""
    needs = algorithm_needs(recipe)
    judged = needs.reference or needs.implicit_reward
    if judged and recipe.reference.nproc > 1:
        yield (
            ("reference", "nproc"),
            f"reference.nproc: {recipe.model.path} is a vision-language model, and its ranks get no images; want 1",
        )
    reference = recipe.reference.path if judged else None
    for at, path in (
        (("reference", "path"), reference),
        (("critic", "path"), recipe.critic.path if needs.critic else None),
    ):
        if path is None:
            continue
        theirs, ours = (_tokens_of_pictures(each, machine) for each in (path, recipe.model.path))
        for name in ours:
            if theirs[name] != ours[name]:
                yield (
                    at,
                    f"{'.'.join(at)}: {path} and model.path must make the same tokens of a picture, and {name} is"
                    f" {theirs[name]} there, {ours[name]} here",
                )
                break


def _tokens_of_pictures(path: Path, machine: ThisMachine) -> dict[str, Any]:
    """The settings that decide how many tokens a picture is, and which."""
    config = machine.json(path / "config.json")
    preprocessor = machine.json(path / "preprocessor_config.json")
    keys = ("patch_size", "merge_size", "size", "min_pixels", "max_pixels")
    return {
        "image_token_id": config.get("image_token_id"),
        **{name: preprocessor.get(name) for name in keys},
    }
