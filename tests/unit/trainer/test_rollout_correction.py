"""Importance weights, rejection and what they report."""

from __future__ import annotations

import math

import pytest
import torch

from meshrl.contract.errors import ConfigError
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.algorithms.recipes.dapo import overlong_penalty
from meshrl.trainer.algorithms.recipes.pf_ppo import resample
from meshrl.trainer.algorithms.rollout_correction import (
    STATISTICS,
    correct,
    importance_weights,
    interpolate,
    mismatch_by,
    mismatch_metrics,
    parse,
    parse_threshold,
)
from meshrl.trainer.config import PfPpoConfig, RolloutCorrectionConfig


def rows(*lengths: int) -> Ragged:
    return Ragged.from_lengths(torch.tensor(lengths), torch.ones(sum(lengths), dtype=torch.bool))


LOG2 = math.log(2)


def test_tis_truncates_icepop_zeroes() -> None:
    x = torch.tensor([LOG2, 3 * LOG2, -3 * LOG2])

    tis, _ = importance_weights(rows(3), x, level="token", threshold=4.0)
    icepop, metrics = importance_weights(rows(3), x, level="token", threshold="0.5_4")

    torch.testing.assert_close(tis, torch.tensor([2.0, 4.0, 0.125]))
    torch.testing.assert_close(icepop, torch.tensor([2.0, 0.0, 0.0]))
    assert metrics["rollout_is_oob_ratio"] == pytest.approx(2 / 3)


def test_a_sequence_weight_is_the_product_over_the_row() -> None:
    weights, _ = importance_weights(
        rows(2, 1), torch.tensor([LOG2, LOG2, -LOG2]), level="sequence", threshold=100.0
    )

    torch.testing.assert_close(weights, torch.tensor([4.0, 4.0, 0.5]))


def test_normalised_weights_have_mean_one() -> None:
    x = torch.tensor([0.3, -0.2, 0.1, 0.5])

    weights, metrics = importance_weights(
        rows(3, 1), x, level="token", threshold=2.0, batch_normalize=True
    )

    assert float(weights.mean()) == pytest.approx(1)
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(float(x.exp().mean()))


def test_weights_that_are_all_zero_have_no_effective_sample() -> None:
    weights, metrics = importance_weights(
        rows(2), torch.full((2,), 5.0), level="token", threshold="0.9_1.1"
    )

    assert (weights == 0).all()
    assert metrics["rollout_is_eff_sample_size"] == 0


def test_a_batch_without_trained_tokens_is_not_an_error() -> None:
    empty = rows(2).with_mask(torch.zeros(2, dtype=torch.bool))
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold=2.0
    )

    found = correct(empty, torch.zeros(2), torch.zeros(2), config)

    assert found.metrics == {}
    assert not found.mask.any()


@pytest.mark.parametrize("name", STATISTICS)
def test_every_statistic_keeps_what_did_not_move_and_drops_what_did(name: str) -> None:
    rollout = torch.full((4,), -1.0)
    train = rollout + torch.tensor([0.0, 0.0, 3.0, 3.0])
    config = RolloutCorrectionConfig(rollout_rs=name, rollout_rs_threshold=1.5)

    found = correct(rows(2, 2), train, rollout, config)

    assert found.mask.tolist() == [True, True, False, False]
    assert found.metrics[f"rollout_corr/rollout_rs_{name}_masked_fraction"] == pytest.approx(0.5)


def test_a_token_statistic_drops_the_token_and_a_row_statistic_the_row() -> None:
    rollout, train = torch.zeros(3), torch.tensor([0.0, 0.0, -2.0])

    for name, expected in (("token_k2", [True, True, False]), ("seq_max_k2", [True, False, False])):
        config = RolloutCorrectionConfig(rollout_rs=name, rollout_rs_threshold=1.0)
        assert correct(rows(1, 2), train, rollout, config).mask.tolist() == expected


def test_k1_bounds_hold_for_the_inverse_of_the_importance_ratio() -> None:
    rollout = torch.zeros(2)
    train = torch.log(torch.tensor([1.9, 0.6]))
    config = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.5_1.2")

    assert correct(rows(2), train, rollout, config).mask.tolist() == [True, False]


@pytest.mark.parametrize(
    ("names", "threshold", "message"),
    [
        ("token_k4", 1.0, "'?token_k4'? is not a statistic"),
        ("token_k1", None, "needs rollout_rs_threshold"),
        ("token_k2", "0.1_0.2", "one upper bound"),
        ("token_k1", "2_1", "0 < lo <= hi"),
        ("token_k1,token_k2", "1.5,0.1,3", "3 values for 2 statistics"),
        ("token_k1", "many", "wanted a number"),
        ("token_k2", "nan", "0 < lo <= hi"),
    ],
)
def test_a_wrong_rejection_setting_is_one_clear_line(
    names: str, threshold: float | str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(names, threshold)


@pytest.mark.parametrize("threshold", ["much", "-1", "3_1", "0_1", "nan"])
def test_a_wrong_weight_threshold_is_one_clear_line(threshold: str) -> None:
    with pytest.raises(ConfigError, match="rollout_is_threshold"):
        parse_threshold(threshold)


def test_an_infinite_bound_bounds_nothing() -> None:
    config = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="inf")
    assert correct(rows(2), torch.tensor([5.0, -5.0]), torch.zeros(2), config).mask.all()
    weights, _ = importance_weights(rows(1), torch.tensor([5.0]), level="sequence", threshold="inf")
    assert float(weights) == pytest.approx(math.exp(5))


def test_the_second_moment_is_a_rejection_too() -> None:
    config = RolloutCorrectionConfig(second_moment_threshold=0.04)

    found = correct(rows(3), torch.tensor([0.1, 2.0, 0.0]), torch.zeros(3), config)

    assert found.mask.tolist() == [True, False, True]
    assert found.metrics["rollout_corr/second_moment_masked_fraction"] == pytest.approx(1 / 3)


def test_the_mismatch_is_reported_per_version() -> None:
    rollout = torch.full((4,), -1.0)
    train = rollout - torch.tensor([0.0, 0.0, 0.5, 0.5])

    by_step = mismatch_by(rows(2, 2), train, rollout, torch.tensor([3, 3, 4, 4]))

    assert by_step[3]["kl"] == pytest.approx(0)
    assert by_step[4]["kl"] == pytest.approx(0.5)
    assert mismatch_metrics(rows(4), train, rollout)["kl"] == pytest.approx(0.25)


def test_the_proximal_policy_moves_to_the_trained_one_with_staleness() -> None:
    rollout, current = torch.full((3,), -2.0), torch.full((3,), -1.0).requires_grad_()

    proximal = interpolate(rollout, current, torch.tensor([0, 1, 4]))

    torch.testing.assert_close(proximal, torch.tensor([-2.0, -2.0, -1.25]))
    assert not proximal.requires_grad


def test_pf_ppo_draws_from_the_ends_of_the_reward_range() -> None:
    s = torch.tensor([0.0, 0.5, 0.5, 1.0])
    generator = torch.Generator().manual_seed(0)

    rows_drawn = resample(s, PfPpoConfig(reweight_method="max_min"), generator=generator)

    assert len(rows_drawn) == 4
    assert set(rows_drawn.tolist()) <= {0, 3}


def test_the_overlong_penalty_grows_within_the_buffer() -> None:
    penalty = overlong_penalty(
        torch.tensor([5, 16, 18, 20]), max_response_length=20, buffer=4, factor=0.5
    )

    assert penalty.tolist() == [0, 0, -0.25, -0.5]
