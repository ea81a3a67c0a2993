"""The changes of a recipe that a run may go on with: compares the recipe of before with the one of now.

A pure function of both. What is told may change, what bends makes the rest another run than its beginning, and the
queue or the checkpoints hold what cannot change. Whatever is not listed here is told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import ValidationError

from meshrl.config.explain import Loc
from meshrl.config.recipe import Recipe, algorithm_needs, has_evaluation
from meshrl.config.stages import eval_spec, train_spec
from meshrl.contract.errors import MeshError
from meshrl.contract.types import RunSpec

BENDS = (
    "run.seed",
    "model.path",
    "model.tokenizer_path",
    "data",
    "reference.path",
    "critic.path",
    "rollout.program",
    "rollout.program_options",
    "stages",
    "reward.functions",
    "reward.judges",
    "reward.custom_reward_function",
    "reward.registry.name",
)
"""Keys, and sections, that say what is learned and from what."""
BENDS_NOT = ("data.max_response_length",)
"""Exceptions in those sections."""
HELD_BY_QUEUE = ("run.name", "queue.store", "queue.redis_prefix")
"""Beside whatever the specs of its runs are made from."""
ADAPTER = (
    "model.lora_rank",
    "model.lora_alpha",
    "model.use_rslora",
    "model.use_dora",
    "model.target_modules",
    "model.exclude_modules",
)
HELD_BY_CHECKPOINTS = (
    "model.freeze_vision_tower",
    "actor.optim.name",
    "critic.optim.name",
    "algorithm.prime.optim.name",
)
"""Beside the adapter, and the models that the algorithm trains with the policy."""
ELSEWHERE = ("run.dir", "placement.machines", "weights.host")
"""Keys that say where a run is, which changes from start to start."""


class Effect(StrEnum):
    """The effect of a change on a run that goes on."""

    TOLD = "told"
    BENDS = "bends"
    QUEUE = "queue"
    """The queue holds it from the run's first start on."""
    CHECKPOINTS = "checkpoints"
    """The checkpoints hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key that is not as before."""

    key: str
    before: Any
    """As in JSON; None where the key was not there."""
    now: Any
    effect: Effect


def changes(before: Recipe, now: Recipe) -> list[Change]:
    """Every key that differs, in the order of the recipe. Both have absolute paths."""
    had, has = _flat(before), _flat(now)
    of_specs = list(_of_specs(before, now))
    found = [
        Change(
            key=dotted(at),
            before=had.get(at),
            now=has.get(at),
            effect=_effect(at, before, now, opens_another=bool(of_specs)),
        )
        for at in {**has, **had}
        if had.get(at) != has.get(at) and not _under(dotted(at), ELSEWHERE)
    ]
    named = any(change.effect is Effect.QUEUE for change in found)
    return found if named else [*found, *of_specs]


def dotted(at: Loc) -> str:
    """A key as a person writes it."""
    return ".".join(map(str, at))


def _effect(at: Loc, before: Recipe, now: Recipe, *, opens_another: bool) -> Effect:
    key = dotted(at)
    with_adapter = bool(before.model.lora_rank or now.model.lora_rank)
    alone, without = _with(before, at, now), _with(now, at, before)
    if _under(key, HELD_BY_QUEUE):
        return Effect.QUEUE
    # The key changes what the queue is asked for, by itself or together with others.
    if opens_another and (_differ(before, alone) or _differ(now, without)):
        return Effect.QUEUE
    if _under(key, HELD_BY_CHECKPOINTS) or (with_adapter and _under(key, ADAPTER)):
        return Effect.CHECKPOINTS
    if alone is not None and _models_beside(alone) - _models_beside(before):
        return Effect.CHECKPOINTS
    if _under(key, BENDS) and not _under(key, BENDS_NOT) and at[-1] != "workers":
        return Effect.BENDS
    return Effect.TOLD


def _under(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _flat(recipe: Recipe) -> dict[Loc, Any]:
    return dict(_leaves(recipe.model_dump(mode="json"), ()))


def _leaves(value: Any, at: Loc) -> Iterator[tuple[Loc, Any]]:
    """Every value that is no section, no list of sections, and no empty list, which may be one of either."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*at, key))
    elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*at, index))
    elif value != []:
        yield at, value


def _with(recipe: Recipe, at: Loc, other: Recipe) -> Recipe | None:
    """The recipe with one value of another one; None where that is no recipe."""
    tree = recipe.model_dump(mode="json")
    here: Any = tree
    given: Any = other.model_dump(mode="json")
    try:
        for part in at[:-1]:
            here = here.setdefault(part, {}) if isinstance(here, dict) else here[part]
            given = given.get(part, {}) if isinstance(given, dict) else given[part]
        if at[-1] in given:
            here[at[-1]] = given[at[-1]]
        else:
            del here[at[-1]]
        return Recipe.model_validate(tree)
    except (LookupError, TypeError, AttributeError, ValidationError):
        return None


def _models_beside(recipe: Recipe) -> set[str]:
    """The models that are trained, and saved, beside the policy."""
    needs = algorithm_needs(recipe)
    return {name for name in ("critic", "implicit_reward") if getattr(needs, name)}


def _differ(recipe: Recipe, other: Recipe | None) -> bool:
    return other is not None and any(True for _ in _of_specs(recipe, other))


def _of_specs(before: Recipe, now: Recipe) -> Iterator[Change]:
    """Differences between the runs that were opened in the queue and those that would be opened now."""
    had, has = _specs(before), _specs(now)
    for name in had.keys() & has.keys():
        for field in dataclasses.fields(RunSpec):
            old, new = getattr(had[name], field.name), getattr(has[name], field.name)
            if field.name != "run" and old != new:
                yield Change(key=field.name, before=old, now=new, effect=Effect.QUEUE)


def _specs(recipe: Recipe) -> dict[str, RunSpec]:
    """The runs of training and evaluation; none of a recipe whose stages cannot be told here."""
    try:
        evaluation = {"evaluation": eval_spec(recipe)} if has_evaluation(recipe) else {}
        return {"training": train_spec(recipe), **evaluation}
    except MeshError:
        return {}
