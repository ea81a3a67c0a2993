"""The keys of a recipe are a promise: a recipe that once loaded loads for good."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.config import Recipe, load_recipe
from meshrl.config.explain import walk
from meshrl.contract.errors import ConfigError

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
