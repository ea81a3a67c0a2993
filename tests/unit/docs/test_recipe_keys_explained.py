"""Each key of a recipe is verl's, or set by a shipped recipe, or on a page that says when to change it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from meshrl.config import Recipe
from meshrl.config.explain import walk
from meshrl.contract.errors import ConfigError
from meshrl.verl.rules import Given
from meshrl.verl.table import rules

ROOT = Path(__file__).parents[3]
LEARNING = ("algorithm", "actor", "critic")
"""Sections of verl's: options of its optimizers, estimators and losses, and of those beside them, by their papers."""
TRIED = (1, "cosine", True, 0.5, "R3", "mlflow", "cpu", "disable", ["x"])
"""Values of all kinds that verl's keys take: one of them is a setting for each key that is translated."""
PAGES = re.compile(r"docs/(how-to|reference)/(?!config|cli|errors|identity)[^/]+|.+/README.md")
"""Pages that a person wrote for who sets up a run, and READMEs of rooms and recipes."""
OVERRIDE = re.compile(r"`([\w.]+)='([^'`]+)'`")
FENCE = re.compile(r"^ *```ya?ml\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def written(pattern: str) -> dict[str, str]:
    """The text of files that git has outside the tests, by path."""
    done = subprocess.run(
        ["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [name for name in done.stdout.splitlines() if not name.startswith("tests/")]
    return {name: (ROOT / name).read_text() for name in names}


def dotted(tree: Any, at: str = "") -> Iterator[str]:
    """Every key in a tree of YAML; items of lists have no names."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            name = f"{at}.{key}" if at else str(key)
            yield name
            yield from dotted(value, name)
    elif isinstance(tree, list):
        for item in tree:
            yield from dotted(item, at)


def in_yaml(texts: list[str]) -> str:
    """The keys that YAML documents set, one a line; what is no YAML by itself has none."""
    found: list[str] = []
    for text in texts:
        with suppress(yaml.YAMLError):
            found += [key for tree in yaml.safe_load_all(text) for key in dotted(tree)]
    return "\n".join(found)


def in_overrides(text: str) -> str:
    """The keys that a page sets as `a.b='{c: 1}'`, one a line."""
    return "\n".join(
        name
        for key, value in OVERRIDE.findall(text)
        for name in (key, *dotted(yaml.safe_load(value), key))
    )


def keys_with_values() -> set[str]:
    """Keys of a recipe that take a value themselves."""
    keys = [key.dotted for key in walk(Recipe)]
    return {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}


def from_verl() -> set[str]:
    """Keys that a command of verl's may set."""
    table, found = rules(), set[str]()
    given = Given({}, {rule.key: rule.default for rule in table})
    for rule in table:
        for value in (rule.default, *TRIED):
            with suppress(ConfigError, TypeError, ValueError, KeyError, AttributeError):
                settings = rule.convert(value, given).settings
                found |= {key.removesuffix(".*") for key in settings}
    return found


def test_each_key_is_verls_or_set_by_a_shipped_recipe_or_explained_on_a_page() -> None:
    pages = {name: page for name, page in written("*.md").items() if PAGES.fullmatch(name)}
    set_there = in_yaml(list(written("*.yaml").values()))
    said = "\n".join(pages.values())
    shown = "\n".join((in_yaml(FENCE.findall(said)), in_overrides(said)))
    verls = from_verl()
    unexplained = []
    for key in sorted(keys_with_values() - verls):
        if key.startswith(tuple(f"{section}." for section in LEARNING)):
            continue
        name = re.escape(key).replace("<name>", r"[\w<>-]+")
        line = re.compile(rf"^{name}(\.|$)", re.MULTILINE)
        text = re.compile(rf"(?<![\w.]){name}(?![\w])")
        if not (line.search(set_there) or line.search(shown) or text.search(said)):
            unexplained.append(key)
    assert not unexplained, (
        "say on a page of docs/how-to or docs/reference when to change it, or make it a constant"
    )
