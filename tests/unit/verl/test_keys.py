"""Every key of verl's default configurations has a rule of its own, and nothing is ignored that nobody has named.

python -m tests.unit.verl.test_keys PACKAGE     writes the names anew, from an unpacked wheel of verl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshrl.verl import sft_table, table
from meshrl.verl.migrate import _rule_of
from meshrl.verl.rules import Given, KeyRule, KeyStatus

NAMES = Path(__file__).parents[2] / "fixtures" / "verl_keys.json"
TABLES = {"rl": table.rules, "sft": sft_table.rules}


def keys(table_of: str) -> list[str]:
    sections = json.loads(NAMES.read_text())[table_of]
    return [f"{at}.{name}" if at else name for at, named in sections.items() for name in named]


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_every_key_of_verls_defaults_has_a_rule_that_names_it_or_its_section(kind: str) -> None:
    rules = TABLES[kind]()
    found = {key: _rule_of(rules, key) for key in keys(kind)}
    assert len(found) > (1000 if kind == "rl" else 200)
    assert [key for key, rule in found.items() if rule is None or rule.unnamed] == []


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_no_wildcard_calls_a_key_that_is_on_a_matter_of_speed(kind: str) -> None:
    """A rule for a whole section translates, refuses, or follows the switch of the section."""
    wrong = [rule.key for rule in TABLES[kind]() if rule.key.endswith(".*") and ignores(rule)]
    assert wrong == []


def ignores(rule: KeyRule) -> bool:
    section = rule.key.removesuffix(".*")
    switches = ("enable", "enabled", "url", "rank")
    on = {f"{section}.{switch}": True for switch in switches}
    others = {"actor_rollout_ref.rollout.name": section.rpartition(".")[2]}
    others |= {"algorithm.adv_estimator": "gae"}
    given = Given({**on, **others, f"{section}.unheard_of": "x"}, {})
    if section.endswith((".rollout.mtp", ".rollout.qat", "mm_processor_kwargs")):
        return False  # copies of the model's and the actor's sections; arguments of images, which are refused
    return rule.convert("x", given).status is KeyStatus.IGNORED


def written(package: Path) -> Mapping[str, Any]:
    """The names in the YAMLs of an unpacked wheel."""
    at = package / "trainer" / "config"
    made = ("ppo_trainer", "ppo_megatron_trainer", "ppo_veomni_trainer", "ppo_torchtitan_trainer")
    files = [at / f"_generated_{name}.yaml" for name in made]
    for policy, name in (("fully_async", "fully_async_ppo"), ("one_step_off", "one_step_off_ppo")):
        for engine in ("", "_megatron"):
            folder = package / "experimental" / f"{policy}_policy" / "config"
            files.append(folder / f"{name}{engine}_trainer.yaml")
    engines = ("fsdp", "megatron", "veomni", "torchtitan")
    sections = {
        "": [at / "sft_trainer_engine.yaml"],
        "model.": [at / "model" / "hf_model.yaml"],
        "engine.": [at / "engine" / f"{name}.yaml" for name in engines],
        "optim.": [at / "optim" / f"{name}.yaml" for name in engines],
        "profiler.": [at / "profiler" / "profiler.yaml"],
    }
    tuning = [(prefix, file) for prefix, several in sections.items() for file in several]
    version = (package / "version" / "version").read_text().strip()
    return {
        "verl": version,
        "rl": folded(key for file in files for key in leaves(yaml.safe_load(file.read_text()))),
        "sft": folded(
            key
            for prefix, file in tuning
            for key in leaves(yaml.safe_load(file.read_text()), prefix)
        ),
    }


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if key in ("_target_", "defaults", "hydra"):
            continue
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def folded(found: Iterator[str]) -> dict[str, list[str]]:
    sections: dict[str, list[str]] = {}
    for key in sorted(set(found)):
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(name)
    return sections


if __name__ == "__main__":
    NAMES.write_text(json.dumps(written(Path(sys.argv[1])), indent=0, sort_keys=True) + "\n")
