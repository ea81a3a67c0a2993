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
from pydantic import PositiveFloat

from meshrl.common.config import Config
from meshrl.trainer.algorithms.advantages._types import AdvantageBatch, Advantages, broadcast
from meshrl.trainer.algorithms.options import options


class Options(Config):
    bound: PositiveFloat = 1.0
    """The largest advantage."""


def compute(batch: AdvantageBatch, config) -> Advantages:
    """The score, at most `bound`."""
    return broadcast(batch, batch.scores.clamp(max=options(config, Options).bound))
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


def write_estimator(folder: Path) -> None:
    """The module `bounded`."""
    folder.mkdir()
    (folder / "bounded.py").write_text(ESTIMATOR)


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
    write_estimator(tmp_path / "mine")
    recipe(tmp_path, "{adv_estimator: mine.bounded, options: {bound: 0.5}}")
    assert python(COMPUTE, tmp_path) == "[0.25, 0.5]\n"


def test_an_estimator_added_to_the_tree_needs_no_other_edit(tmp_path: Path) -> None:
    package = "meshrl.trainer.algorithms.advantages"
    write_estimator(tmp_path / "added")
    recipe(tmp_path, "{adv_estimator: bounded, bound: 0.5}")
    add = f"""
import {package}
{package}.__path__.append("added")
"""
    assert python(add + COMPUTE, tmp_path) == "[0.25, 0.5]\n"


def test_options_from_outside_are_checked_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_estimator(tmp_path / "theirs")
    monkeypatch.syspath_prepend(str(tmp_path))
    at = f"{tmp_path}/my.yaml:2: algorithm.options"
    assert refusal(recipe(tmp_path, "{adv_estimator: theirs.bounded, options: {bund: 1}}")) == (
        f"{at}.bund: no such option; did you mean 'bound'?"
    )
    assert "greater than 0" in refusal(
        recipe(tmp_path, "{adv_estimator: theirs.bounded, options: {bound: 0}}")
    )


@pytest.mark.parametrize("named", ["my_package._options.bounded", "._options.bounded"])
def test_options_in_a_file_of_their_own_are_checked_without_the_estimator(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_package: None
) -> None:
    (tmp_path / "my_package" / "_options").mkdir(parents=True)
    (tmp_path / "my_package" / "bounded.py").write_text(
        f"import not_installed\nfrom {named} import Options\n{ESTIMATOR.partition('class Options')[0]}"
    )
    (tmp_path / "my_package" / "_options" / "bounded.py").write_text(
        ESTIMATOR.partition("def compute")[0]
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    wrong = refusal(recipe(tmp_path, "{adv_estimator: my_package.bounded, options: {bund: 1}}"))
    assert wrong.endswith("algorithm.options.bund: no such option; did you mean 'bound'?")
    assert "my_package.bounded" not in sys.modules


def test_options_for_an_estimator_that_takes_none_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "estimator.py").write_text("NEEDS = ()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plain = refusal(recipe(tmp_path, "{adv_estimator: plain.estimator, options: {a: 1}}"))
    assert plain.endswith("algorithm.options: plain.estimator takes none (it has no class Options)")
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
