"""Each shipped recipe means what it meant at commit 9121209e, but for keys that were dropped in the open."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshrl.common.config import Config
from meshrl.config import Recipe, load_recipe
from meshrl.config.dropped_keys import DROPPED_KEYS
from meshrl.config.explain import walk
from meshrl.config.loading import Written
from meshrl.config.machine import AssumedMachine, Assumptions
from meshrl.contract.errors import ConfigError
from meshrl.trainer.offline.config import DpoConfig, RewardModelConfig, SftConfig

from ...frozen_queue import FROZEN

ROOT = Path(__file__).parents[3]
DROPPED: Collection[str] = {".".join(map(str, key)) for key in DROPPED_KEYS}
"""Keys of then that no recipe has now, with all below them; `N` stands for a place in a list."""
OFFLINE: Mapping[str, type[Config]] = {
    "recipes/gsm8k/sft.yaml": SftConfig,
    "recipes/preferences/dpo.yaml": DpoConfig,
    "recipes/preferences/reward.yaml": RewardModelConfig,
    "recipes/vision/sft.yaml": SftConfig,
}
"""Recipes of commands beside `up`."""
DEFAULTS = "defaults"
RECIPES: Mapping[str, Mapping[str, Any]] = yaml.safe_load((FROZEN / "recipes.yaml").read_text())
"""Values by dotted key, by path of the recipe: all of one that names only a model; of the others, differences."""


def values(path: Path, kind: type[Config] | None = None) -> dict[str, Any]:
    """Output of `meshrl config show` for a recipe, by dotted key, on a machine without a GPU."""
    if kind is not None:
        return dict(flat(Written.read(path, ()).as_config(kind).model_dump(mode="json")))
    machine = AssumedMachine(Assumptions(gpus=0))
    recipe = load_recipe(path, check=False, hub=False, machine=machine)
    return dict(flat(recipe.model_dump(mode="json")))


def flat(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves, by dotted key. What is empty is a leaf, and so is a list of no sections."""
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        value = dict(enumerate(value))
    if not (isinstance(value, dict) and value):
        yield at, value
        return
    for name, below in value.items():
        yield from flat(below, f"{at}.{name}" if at else str(name))


def expected(path: str) -> dict[str, Any]:
    """The frozen result of `values`: the recipe's own values over the defaults."""
    found = dict(RECIPES[path])
    inner = {key[: end.start()] for key in found for end in re.finditer(r"\.", key)}
    for key, value in ({} if path in OFFLINE else RECIPES[DEFAULTS]).items():
        replaced = key in inner or any(f"{key}.".startswith(f"{own}.") for own in found)
        if not replaced:
            found[key] = value
    return {key: value for key, value in found.items() if not dropped(key)}


def dropped(key: str) -> bool:
    """Whether the key, or one above it, is named in DROPPED."""
    general = re.sub(r"\.\d+(?=\.|$)", ".N", key)
    return any(f"{general}.".startswith(f"{name}.") for name in DROPPED)


@pytest.mark.parametrize("path", sorted(RECIPES.keys() - {DEFAULTS}))
def test_a_shipped_recipe_means_what_it_meant(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    then, now = expected(path), values(Path(path), OFFLINE.get(path))
    gone = sorted(then.keys() - now.keys())
    assert not gone, "keys that went: name them in DROPPED"
    assert {key: now[key] for key in then} == then


KEYS = Path(__file__).parents[2] / "fixtures" / "recipe_keys.txt"
"""Every key that a recipe has or had, one a line, sorted."""


def test_the_keys_of_a_recipe_are_the_frozen_ones(tmp_path: Path) -> None:
    frozen = KEYS.read_text().splitlines()
    present = {key.dotted for key in walk(Recipe)}
    added = sorted(present - set(frozen))
    assert not added, f"new keys of a recipe: add them to {KEYS}, sorted: {added}"
    assert frozen == sorted(set(frozen)), f"{KEYS} is not sorted"
    path = tmp_path / "old.yaml"
    path.write_text("model: {path: model}\ndata: {reasoning_gym: {tasks: {gcd: {}}, levels: 2}}\n")
    for key in frozen:
        if key in present:
            continue
        try:
            load_recipe(path, [f"{key}=null"], check=False)
        except ConfigError as error:
            pytest.fail(
                f"{key} is no key any more, and a recipe that has it is refused ({error}): bring the key back, "
                "or add it to DROPPED_KEYS in meshrl/config/loading.py"
            )
