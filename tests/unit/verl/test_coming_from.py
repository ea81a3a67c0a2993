"""The page for people from other frameworks: its recipe loads, its verl command says the same, its keys exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from meshrl.config import load_recipe
from meshrl.verl import migrate
from meshrl.verl.rules import KeyStatus

from .verl_commands import command_words

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "how-to" / "coming-from.md").read_text()
KEYS = set((ROOT / "tests" / "fixtures" / "recipe_keys.txt").read_text().split())


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def leaves(tree: dict[str, Any], at: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{at}{key}.") if isinstance(value, dict) else {at + key: value}
    return found


def test_the_verl_command_becomes_the_recipe_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "page.yaml"
    file.write_text(block("yaml"))
    load_recipe(file, check=False)
    found = re.search(r"^```\n(python3 -m verl.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None
    made = migrate(command_words(found[1], {}))
    assert not made.of(KeyStatus.REFUSED)
    says = leaves(made.tree)
    wanted = leaves(yaml.safe_load(block("yaml")))
    assert {key: says.get(key) for key in wanted} == wanted


def test_every_key_that_the_tables_name_is_a_key() -> None:
    sections = {key.split(".")[0] for key in KEYS}
    rows = [row.split("|")[2] for row in PAGE.splitlines() if row.startswith("| ")]
    named = [word for row in rows for word in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)", row)]
    assert len(named) > 40
    assert [key for key in named if key.split(".")[0] in sections and key not in KEYS] == []
