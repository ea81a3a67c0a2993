"""Every named algorithm: its recipe is whole, one step goes the right way, and no split of the batch changes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from meshrl.common.plugins import load
from meshrl.config.loading import load_recipe
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
