"""`algorithm.name` of a recipe: the `DEFAULTS` in that algorithm's file become the defaults of their keys.

    recipe as written ──▶ merged over DEFAULTS of the estimator or the loss <name>, or of `recipes.<name>` ──▶ recipe

Keys that the recipe sets win, so an algorithm is changed by a key, not by a copy. Imports no torch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from meshrl.common import plugins
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

COMBINED = "meshrl.trainer.algorithms.recipes"
Tree: TypeAlias = Mapping[str, Any]
"""Sections of a recipe, as YAML gives them."""
Place: TypeAlias = tuple[str, ...]


def name_of(tree: Tree) -> str | None:
    """`algorithm.name` of a recipe, or None."""
    section = tree.get("algorithm")
    name = section.get("name") if isinstance(section, Mapping) else None
    return name if isinstance(name, str) else None


@functools.cache
def homes() -> Mapping[str, str]:
    """Each named algorithm with its module, sorted."""
    modules = {
        module
        for package in (ADVANTAGES, LOSSES, COMBINED)
        for module in plugins.modules(package).values()
    }
    named = [each for each in modules if plugins.constant("", each, "DEFAULTS", None)]
    return dict(
        sorted(
            (plugins.constant("", each, "NAME", each.rpartition(".")[2]), each) for each in named
        )
    )


def defaults(name: str) -> dict[str, Any]:
    """The settings of algorithm `name`, by section.

    Raises:
        ConfigError: no such algorithm.
    """
    if "." not in name and name not in homes():
        raise plugins.unknown("recipes", name, list(homes()))
    settings: dict[str, Any] = copy.deepcopy(
        plugins.load(COMBINED, homes().get(name, name), "DEFAULTS")
    )
    return settings


def correction(tree: Tree) -> dict[str, Any]:
    """TIS, where engines quantise the weights and so sample from another policy, and nothing else corrects for it."""
    engine = _section(_section(tree, "rollout"), "engine")
    given = _section(_section(tree, "algorithm"), "rollout_correction")
    corrected = given.get("bypass_mode") or given.get("proximal") == "interpolate"
    if not engine.get("quantization") or corrected:
        return {}
    return {"algorithm": {"rollout_correction": {"rollout_is": "token"}}}


def _section(tree: Tree, name: str) -> Tree:
    found = tree.get(name)
    return found if isinstance(found, Mapping) else {}


def merged(tree: Tree, under: Tree) -> dict[str, Any]:
    """`tree` with the keys of `under` that it lacks; neither is changed."""
    result = copy.deepcopy(dict(tree))
    for key, value in under.items():
        own = result.get(key)
        if isinstance(value, Mapping) and (isinstance(own, Mapping) or own is None):
            result[key] = merged(own or {}, value)
        elif key not in result:
            result[key] = copy.deepcopy(value)
    return result


def places(tree: Tree, at: Place = ()) -> Iterator[Place]:
    """Every key that holds a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from places(value, (*at, key))
        else:
            yield (*at, key)
