"""An algorithm brings its options with it: adding one edits no other file, inside the tree or outside of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meshrl.config.explain import walk
from meshrl.config.loading import load_recipe
from meshrl.config.recipe import Recipe
from meshrl.contract.errors import ConfigError

ESTIMATOR = '''
from {package}._options.bounded import Options
from meshrl.trainer.algorithms.advantages._types import AdvantageBatch, Advantages, broadcast
from meshrl.trainer.algorithms.options import options
from meshrl.trainer.config import AlgorithmConfig

NEEDS: tuple[str, ...] = ()


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """The score, at most `bound`."""
    return broadcast(batch, batch.scores.clamp(max=options(config, Options).bound))
'''
OPTIONS = '''
from pydantic import PositiveFloat

from meshrl.common.config import Config


class Options(Config):
    bound: PositiveFloat = 1.0
    """The largest advantage."""
'''
COMPUTE = """
from pathlib import Path
import torch
from meshrl.config.loading import load_recipe
from meshrl.common import plugins
from meshrl.trainer.algorithms.advantages._types import AdvantageBatch, outcome_rewards
from meshrl.trainer.algorithms.ragged import Ragged

algorithm = load_recipe(Path("my.yaml"), sections=("algorithm",)).algorithm
layout = Ragged.from_lengths(torch.tensor([1, 1]), torch.ones(2, dtype=torch.bool))
batch = AdvantageBatch(
    ragged=layout, token_rewards=outcome_rewards(layout, torch.tensor([0.25, 9.0]))
)
compute = plugins.load("meshrl.trainer.algorithms.advantages", algorithm.adv_estimator, "compute")
print(compute(batch, algorithm).advantages.tolist())
"""


def write_estimator(folder: Path, package: str) -> None:
    """The modules `bounded` and `_options.bounded` in `folder`, which is (part of) `package`."""
    (folder / "_options").mkdir(parents=True)
    (folder / "bounded.py").write_text(ESTIMATOR.format(package=package))
    (folder / "_options" / "bounded.py").write_text(OPTIONS)


def python(code: str, directory: Path) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=directory, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def recipe(directory: Path, algorithm: str) -> Path:
    path = directory / "my.yaml"
    path.write_text(f"model: {{path: model}}\nalgorithm: {algorithm}\n")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        load_recipe(path, sections=("algorithm",))
    return str(refused.value)


def test_an_estimator_from_outside_the_tree_reads_its_own_options(tmp_path: Path) -> None:
    write_estimator(tmp_path / "mine", "mine")
    recipe(tmp_path, "{adv_estimator: mine.bounded, options: {bound: 0.5}}")
    assert python(COMPUTE, tmp_path) == "[0.25, 0.5]\n"


def test_an_estimator_added_to_the_tree_needs_no_other_edit(tmp_path: Path) -> None:
    package = "meshrl.trainer.algorithms.advantages"
    write_estimator(tmp_path / "added", package)
    recipe(tmp_path, "{adv_estimator: bounded, bound: 0.5}")
    add = f"""
import {package}, {package}._options
{package}.__path__.append("added")
{package}._options.__path__.append("added/_options")
"""
    assert python(add + COMPUTE, tmp_path) == "[0.25, 0.5]\n"


def test_options_from_outside_are_checked_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_estimator(tmp_path / "theirs", "theirs")
    monkeypatch.syspath_prepend(str(tmp_path))
    at = f"{tmp_path}/my.yaml:2: algorithm.options"
    assert refusal(recipe(tmp_path, "{adv_estimator: theirs.bounded, options: {bund: 1}}")) == (
        f"{at}.bund: no such option; did you mean 'bound'?"
    )
    assert "greater than 0" in refusal(
        recipe(tmp_path, "{adv_estimator: theirs.bounded, options: {bound: 0}}")
    )
    assert "theirs.bounded" not in sys.modules, "a check imports no algorithm"


def test_options_for_an_estimator_that_takes_none_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "estimator.py").write_text("NEEDS = ()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plain = refusal(recipe(tmp_path, "{adv_estimator: plain.estimator, options: {a: 1}}"))
    assert plain.endswith(
        "plain.estimator takes none (there is no module plain._options.estimator)"
    )
    named = refusal(recipe(tmp_path, "{adv_estimator: grpo, options: {a: 1}}"))
    assert "only for a module named by a dotted path" in named


def test_options_of_algorithms_that_are_not_chosen_are_accepted_and_checked(tmp_path: Path) -> None:
    algorithm = load_recipe(
        recipe(tmp_path, "{adv_estimator: grpo, gigpo: {mode: mean_std_norm}, sppo_beta: 0}"),
        sections=("algorithm",),
    ).algorithm
    assert algorithm.model_dump()["gigpo"]["mode"] == "mean_std_norm"
    wrong = refusal(recipe(tmp_path, "{adv_estimator: grpo, sppo_beta: -1}"))
    assert "algorithm.sppo_beta: got -1" in wrong


def test_every_option_of_an_algorithm_is_a_key_that_can_be_explained() -> None:
    keys = {key.dotted: key for key in walk(Recipe)}
    assert "Reward components" in keys["algorithm.gdpo_reward_keys"].doc
    assert keys["actor.policy_loss.tau_neg"].default_text == "1.05"
