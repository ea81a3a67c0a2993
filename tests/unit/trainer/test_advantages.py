"""Advantages: the formulas of the papers, and what they do where verl's numbers are a trap."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from meshrl.common import plugins
from meshrl.contract.errors import ConfigError
from meshrl.trainer.algorithms.advantages._types import AdvantageBatch, Advantages, outcome_rewards
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.config import AlgorithmConfig

ESTIMATORS = plugins.known("meshrl.trainer.algorithms.advantages")


def ragged(*rows: str, groups: list[int]) -> Ragged:
    """One string per row, `1` for a trained token and `0` for a tool's."""
    mask = torch.tensor([char == "1" for row in rows for char in row])
    return Ragged.from_lengths(torch.tensor([len(r) for r in rows]), mask, torch.tensor(groups))


def compute(name: str, batch: AdvantageBatch, **settings: object) -> Advantages:
    config = AlgorithmConfig.model_validate({"adv_estimator": name, **settings})
    found: Advantages = plugins.load("meshrl.trainer.algorithms.advantages", name, "compute")(
        batch, config
    )
    return found


def everything(layout: Ragged, rewards: Tensor) -> AdvantageBatch:
    """A batch with whatever any estimator could need."""
    torch.manual_seed(0)
    tokens = layout.num_tokens
    return AdvantageBatch(
        ragged=layout,
        token_rewards=outcome_rewards(layout, rewards),
        values=torch.randn(tokens),
        old_logprobs=-torch.rand(tokens),
        reward_baselines=rewards,
        sum_pi_squared=torch.rand(tokens),
        implicit_rewards=torch.zeros(tokens),
        trajectories=torch.arange(layout.num_rows),
        anchors=torch.arange(layout.num_rows),
        data_answers=torch.arange(layout.num_rows) % 2 == 0,
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_is_zero_at_masked_tokens(name: str) -> None:
    layout = ragged("1101", "0110", "111", "10", "", "1", groups=[0, 0, 1, 1, 1, 2])

    found = compute(name, everything(layout, torch.tensor([1.0, 0, 0.5, 1, 0, 1])))

    assert found.advantages.shape == found.returns.shape == (layout.num_tokens,)
    assert found.advantages.dtype == torch.float32
    assert torch.isfinite(found.advantages).all()
    assert (found.advantages[~layout.mask] == 0).all()
    assert (found.returns[~layout.mask] == 0).all()


GROUP_RELATIVE = (
    "grpo",
    "grpo_vectorized",
    "dr_grpo",
    "gdpo",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "reinforce_plus_plus_baseline",
    "preference",
)


@pytest.mark.parametrize("name", GROUP_RELATIVE)
@pytest.mark.parametrize("reward", [0.6, 0.9, 0.1, 1 / 3])
def test_a_group_of_equal_rewards_gives_exactly_zero(name: str, reward: float) -> None:
    layout = ragged(*["111"] * 8, groups=[0] * 8)

    found = compute(name, everything(layout, torch.full((8,), reward)))

    assert (found.advantages == 0).all()
    if found.metrics:
        assert found.metrics["advantages/rows_in_equal_groups"] == 1


@pytest.mark.parametrize(
    "name", [*GROUP_RELATIVE, "optimal_token_baseline", "tir_optimal_token_baseline"]
)
def test_a_row_without_siblings_teaches_nothing(name: str) -> None:
    layout = ragged("11", "11", "11", groups=[0, 0, 1])

    found = compute(name, everything(layout, torch.tensor([0.0, 1.0, 1.0])))
    alone = found.advantages[4:]

    if name.endswith("gdpo") or name.startswith("reinforce"):  # whitened: centred already
        assert alone.abs().max() < 1e-6
    else:
        assert (alone == 0).all()


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg"])
def test_verls_conventions_return_the_reward_of_a_row_without_siblings(name: str) -> None:
    layout = ragged("11", groups=[0])

    found = compute(name, everything(layout, torch.tensor([0.5])), conventions="verl")

    torch.testing.assert_close(found.advantages, torch.tensor([0.5, 0.5]), atol=1e-5, rtol=0)


def test_grpo_normalises_within_groups() -> None:
    layout = ragged("11", "1", "1", "111", groups=[0, 0, 5, 5])
    batch = everything(layout, torch.tensor([1.0, 0, 2, 4]))

    spread = math.sqrt(0.5)
    with_std = compute("grpo", batch).advantages
    without = compute("grpo", batch, norm_adv_by_std_in_grpo=False).advantages

    torch.testing.assert_close(
        with_std, torch.tensor([1.0, 1, -1, -1, 1, 1, 1]) * 0.5 / spread, atol=1e-5, rtol=1e-5
    )
    assert without.tolist() == [0.5, 0.5, -0.5, -1, 1, 1, 1]
    assert compute("dr_grpo", batch).advantages.tolist() == without.tolist()


def test_grpo_judges_the_last_row_of_an_episode_for_all_of_it() -> None:
    layout = ragged("1", "1", "1", groups=[0, 0, 0])
    batch = AdvantageBatch(
        ragged=layout,
        token_rewards=torch.tensor([9.0, 1.0, 0.0]),
        trajectories=torch.tensor([7, 7, 3]),
    )

    found = compute("grpo", batch, norm_adv_by_std_in_grpo=False)

    assert found.advantages.tolist() == [0.5, 0.5, -0.5]


def recursive_gae(r: Tensor, V: Tensor, gamma: float, lam: float) -> Tensor:
    A = torch.zeros(len(r), dtype=torch.float64)
    running, following = 0.0, 0.0
    for t in reversed(range(len(r))):
        running = float(r[t]) + gamma * following - float(V[t]) + gamma * lam * running
        A[t], following = running, float(V[t])
    return A.float()


def test_gae_is_the_recursion_over_trained_tokens() -> None:
    layout = ragged("11011", "111", "0", "1", groups=[0, 1, 2, 3])
    torch.manual_seed(1)
    batch = AdvantageBatch(ragged=layout, token_rewards=torch.randn(10), values=torch.randn(10))
    assert batch.values is not None

    found = compute("gae", batch, gamma=0.9, lam=0.8)

    by_row = [
        recursive_gae(batch.token_rewards[rows], batch.values[rows], 0.9, 0.8)
        for rows in ([0, 1, 3, 4], [5, 6, 7], [9])
    ]
    torch.testing.assert_close((found.returns - batch.values)[layout.mask], torch.cat(by_row))
    assert abs(float(found.advantages[layout.mask].mean())) < 1e-6
    assert float(found.advantages[layout.mask].std()) == pytest.approx(1, abs=1e-4)


def test_vapo_reaches_further_in_longer_rows_and_trains_the_critic_on_plain_returns() -> None:
    layout = ragged("1" * 40, "1" * 10, groups=[0, 1])
    torch.manual_seed(2)
    batch = AdvantageBatch(ragged=layout, token_rewards=torch.randn(50), values=torch.randn(50))
    assert batch.values is not None

    found = compute("vapo", batch)

    lam = 1 - 1 / (0.05 * 40)
    raw = torch.cat(
        [
            recursive_gae(batch.token_rewards[:40], batch.values[:40], 1.0, lam),
            recursive_gae(batch.token_rewards[40:], batch.values[40:], 1.0, 0.0),
        ]
    )
    torch.testing.assert_close(
        found.advantages, (raw - raw.mean()) / raw.std(), atol=1e-5, rtol=1e-5
    )
    to_go = torch.cat(
        [part.flip(0).cumsum(0).flip(0) for part in batch.token_rewards.split([40, 10])]
    )
    torch.testing.assert_close(found.returns, to_go, atol=1e-5, rtol=1e-5)


def test_outcomes_are_paid_at_the_last_trained_token_so_that_no_estimator_misses_them() -> None:
    layout = ragged("1100", "00", "", "1", groups=[0, 1, 2, 3])

    rewards = outcome_rewards(layout, torch.tensor([1.0, 2, 3, 4]))

    assert rewards.tolist() == [0, 1, 0, 0, 0, 2, 4]


def test_gdpo_keeps_apart_what_the_sum_of_rewards_cannot_tell() -> None:
    layout = ragged("1", "1", "1", groups=[0, 0, 0])
    batch = AdvantageBatch(
        ragged=layout,
        token_rewards=torch.tensor([1.0, 1.0, 0.0]),
        reward_components={
            "format": torch.tensor([1.0, 0.0, 0.0]),
            "right": torch.tensor([0.0, 1.0, 0.0]),
        },
    )

    found = compute(
        "gdpo", batch, gdpo_reward_keys=["format", "right"], gdpo_reward_weights=[0.1, 1.0]
    )

    assert found.advantages[1] > found.advantages[0] > found.advantages[2]


def test_a_component_that_no_reward_reports_is_named() -> None:
    layout = ragged("1", "1", groups=[0, 0])

    with pytest.raises(ConfigError, match="no component 'style'"):
        compute("gdpo", everything(layout, torch.ones(2)), gdpo_reward_keys=["style"])


@pytest.mark.parametrize(
    ("name", "field"),
    [("gae", "values"), ("remax", "reward_baselines"), ("optimal_token_baseline", "old_logprobs")],
)
def test_a_missing_input_is_named(name: str, field: str) -> None:
    layout = ragged("11", "11", groups=[0, 0])
    batch = AdvantageBatch(ragged=layout, token_rewards=torch.zeros(4))

    with pytest.raises(ConfigError, match=f"{name} needs {field}"):
        compute(name, batch)


def test_sppo_compares_within_the_prompt() -> None:
    layout = ragged("1", "1", "1", "1", groups=[0, 0, 1, 1])
    batch = everything(layout, torch.tensor([0.0, 1.0, 10.0, 11.0]))

    found = compute("sppo", batch, sppo_beta=0)

    assert found.advantages.tolist() == [-0.5, 0.5, -0.5, 0.5]
    whole = compute("sppo", batch, sppo_beta=0, conventions="verl")
    assert whole.advantages.tolist() == [-5.5, -4.5, 4.5, 5.5]


def test_preferences_pair_the_best_with_the_worst() -> None:
    layout = ragged("1", "1", "1", "1", "1", groups=[0, 0, 0, 1, 1])
    batch = everything(layout, torch.tensor([0.2, 0.9, 0.1, 0.4, 0.4]))

    assert compute("preference", batch).advantages.tolist() == [0, 1, -1, 0, 0]
    tied = compute("preference", batch, conventions="verl").advantages.tolist()
    assert tied == [0, 1, -1, 1, -1]


def test_a_preference_is_between_rows_that_have_a_trained_token() -> None:
    layout = ragged("1", "1", "0", "", "1", "0", groups=[0, 0, 0, 0, 1, 1])
    batch = everything(layout, torch.tensor([0.2, 0.9, 3.0, -3.0, 0.4, 0.1]))
    for conventions in ("meshrl", "verl"):
        found = compute("preference", batch, conventions=conventions).advantages
        assert found.tolist() == [-1, 1, 0, 0, 0]


def test_partial_groups_are_counted() -> None:
    layout = ragged("1", "1", "1", groups=[0, 0, 1])
    batch = AdvantageBatch(
        ragged=layout,
        token_rewards=torch.tensor([0.0, 1.0, 1.0]),
        group_sizes=torch.tensor([2, 2, 4]),
    )

    metrics = compute("grpo", batch).metrics

    assert metrics["advantages/rows_in_partial_groups"] == pytest.approx(1 / 3)
    assert metrics["advantages/rows_alone"] == pytest.approx(1 / 3)
