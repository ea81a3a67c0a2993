"""Named algorithms: each recipe is whole, one step goes the right way, no split changes it; options of formulas."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshrl.common.plugins import load
from meshrl.config.explain import walk
from meshrl.config.loading import load_recipe
from meshrl.config.recipe import Recipe
from meshrl.contract.errors import ConfigError
from meshrl.trainer.algorithms.recipe_defaults import COMBINED, defaults, homes, merged, name_of
from meshrl.trainer.checkpoint import checkpoint
from meshrl.trainer.checkpoint.checkpoint import TrainerState
from meshrl.trainer.ranks.world import World

from . import named_algorithms
from .ranks import Ranks

ROOT = Path(__file__).parents[3]
TWENTY_ONE = (
    "ppo",
    "grpo",
    "dr_grpo",
    "dapo",
    "vapo",
    "rloo",
    "reinforce_plus_plus",
    "remax",
    "gspo",
    "cispo",
    "gmpo",
    "sapo",
    "opo",
    "gpg",
    "pf_ppo",
    "prime",
    "sppo",
    "spin",
    "online_dpo",
    "gigpo",
    "hgpo",
)


def test_every_algorithm_has_a_file_a_recipe_and_a_row_in_the_docs() -> None:
    assert set(TWENTY_ONE) == set(homes()) == set(named_algorithms.NAMES)
    page = (ROOT / "docs/reference/algorithms.md").read_text()
    for name, module in homes().items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| [`{name}`](")]
        (paper,) = re.findall(r"https://arxiv.org/abs/[\d.]+", row)
        assert paper in load(COMBINED, module, "__doc__")


def test_what_is_written_wins_over_the_algorithm(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "model: {path: m}\nalgorithm: {name: dapo, overlong_buffer: {len: 7}}\nactor: {clip_ratio_high: 0.5}\n"
    )
    recipe = load_recipe(path, ["rollout.n=4", "algorithm.filter_groups.enable=false"], check=False)
    assert recipe.actor.clip_ratio_high == 0.5 and recipe.actor.clip_ratio_low == 0.2
    assert recipe.rollout.n == 4 and not recipe.algorithm.filter_groups.enable
    assert recipe.algorithm.overlong_buffer.enable and recipe.algorithm.overlong_buffer.len == 7


def test_an_unknown_algorithm_is_one_line_with_the_nearest_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: {path: m}\nalgorithm:\n  name: dappo\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:3: .*did you mean 'dapo'\?"):
        load_recipe(path, check=False)


def test_merging_changes_neither_side() -> None:
    written = {"actor": None, "algorithm": {"name": "ppo"}}
    under = defaults("ppo")
    whole = merged(written, under)
    assert whole["actor"]["clip_ratio"] == 0.2 and written["actor"] is None
    assert name_of(whole) == "ppo" and under == defaults("ppo")


@pytest.mark.parametrize("name", named_algorithms.NAMES)
def test_one_step_makes_rewarded_rows_likelier(name: str, tiny_path: Path, world: World) -> None:
    recipe = named_algorithms.recipe_of(
        name, tiny_path, "actor.optim={lr: 1.0e-3}", "critic.pretrain_steps=0", "critic.warmup_steps=0"
    )  # fmt: skip
    learner = named_algorithms.learner_of(recipe, world)
    rows = named_algorithms.trajectories(recipe, tiny_path)
    before = named_algorithms.row_logprobs(learner, recipe, rows)
    metrics = named_algorithms.learn(learner, recipe, rows)
    gain = named_algorithms.row_logprobs(learner, recipe, rows) - before
    rewards = torch.tensor([row.reward for row in rows])
    assert metrics["actor/grad_norm"] > 0
    assert gain[rewards == 1].mean() > gain[rewards == 0].mean() + 1e-4


@pytest.mark.parametrize("name", named_algorithms.NAMES)
def test_the_split_into_micro_batches_changes_no_gradient_of_any_model(
    name: str, tiny_path: Path, world: World
) -> None:
    found = []
    for budget in (10_000, 40):
        recipe = named_algorithms.recipe_of(
            name,
            tiny_path,
            f"actor.ppo_max_token_len_per_gpu={budget}",
            *named_algorithms.GRADIENTS,
        )
        learner = named_algorithms.learner_of(recipe, world)
        rows = named_algorithms.trajectories(recipe, tiny_path)
        start = named_algorithms.weights(learner)
        metrics = named_algorithms.learn(learner, recipe, rows)
        found.append((metrics, named_algorithms.weights(learner), start))
    (whole, ours, start), (split, theirs, _) = found
    assert split["batch/micro_batches"] > whole["batch/micro_batches"]
    assert_same_update(ours, theirs, start)
    moved = {key.partition(".")[0] for key in ours if not torch.equal(ours[key], start[key])}
    assert moved == {"policy", *learner.beside}
    for key in {"actor/loss", "critic/loss", "prime/loss"} & whole.keys():
        assert split[key] == pytest.approx(whole[key], rel=1e-4, abs=1e-5)


def assert_same_update(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], start: dict[str, torch.Tensor]
) -> None:
    for key in ours:
        scale = max(1.0, float((ours[key] - start[key]).abs().max()))
        torch.testing.assert_close(theirs[key], ours[key], rtol=0, atol=2e-5 * scale)


def test_two_ranks_give_the_gradients_of_one_to_every_model(
    tiny_path: Path, tmp_path: Path, world: World, ranks: Ranks
) -> None:
    names = ["ppo", "prime", "pf_ppo", "online_dpo"]
    found = tmp_path / "found.pt"
    ranks.run("algorithms", tiny_path, found, names, output=tmp_path / "output", ranks=2)
    theirs = torch.load(found)
    for name in names:
        recipe = named_algorithms.recipe_of(name, tiny_path, *named_algorithms.GRADIENTS)
        learner = named_algorithms.learner_of(recipe, world)
        start = named_algorithms.weights(learner)
        named_algorithms.learn(learner, recipe, named_algorithms.trajectories(recipe, tiny_path))
        assert_same_update(named_algorithms.weights(learner), theirs[name], start)


@pytest.mark.parametrize("name", ["ppo", "prime"])
def test_a_model_beside_the_policy_is_resumed_with_it(
    name: str, tiny_path: Path, world: World, tmp_path: Path
) -> None:
    recipe = named_algorithms.recipe_of(name, tiny_path, "critic.warmup_steps=0")
    rows = named_algorithms.trajectories(recipe, tiny_path)
    given_learner = named_algorithms.learner_of(recipe, world)
    named_algorithms.learn(given_learner, recipe, rows, step=0)
    state = TrainerState(run="r", step=1, epoch=1, seed=0, world_size=1, kl_coef=0.0)
    path = checkpoint.save(
        tmp_path,
        given_learner.policy,
        given_learner.optimizers,
        state,
        world,
        keep=1,
        beside=given_learner.beside,
    )
    named_algorithms.learn(given_learner, recipe, rows, step=1)
    resumed = named_algorithms.learner_of(recipe, world)
    loaded = checkpoint.load(path, resumed.policy, resumed.optimizers, beside=resumed.beside)
    assert loaded.beside == tuple(given_learner.beside)
    named_algorithms.learn(resumed, recipe, rows, step=1)
    ours, theirs = named_algorithms.weights(given_learner), named_algorithms.weights(resumed)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_checkpoint_without_the_critic_that_is_wanted_is_refused(
    tiny_path: Path, world: World, tmp_path: Path
) -> None:
    plain = named_algorithms.learner_of(named_algorithms.recipe_of("dapo", tiny_path), world)
    state = TrainerState(run="r", step=1, epoch=1, seed=0, world_size=1, kl_coef=0.0)
    path = checkpoint.save(tmp_path, plain.policy, plain.optimizers, state, world, keep=1)
    wanting = named_algorithms.learner_of(named_algorithms.recipe_of("ppo", tiny_path), world)
    with pytest.raises(Exception, match="was written without a critic"):
        checkpoint.load(path, wanting.policy, wanting.optimizers, beside=wanting.beside)


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


def test_every_formula_with_its_options_is_imported_where_torch_is_not_installed(
    tmp_path: Path,
) -> None:
    code = """
import importlib, sys
sys.modules["torch"] = None
from meshrl.common import plugins
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.trainer.algorithms.recipe_defaults import COMBINED
for package in (ADVANTAGES, LOSSES, COMBINED):
    for module in plugins.modules(package).values():
        importlib.import_module(module)
print("all")
"""
    assert python(code, tmp_path) == "all\n"


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
