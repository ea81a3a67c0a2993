"""KL estimators, controllers, and the penalty in the reward."""

from __future__ import annotations

import math

import pytest
import torch

from meshrl.contract.errors import ConfigError
from meshrl.trainer.algorithms.kl import KlController, kl_in_reward, kl_penalty
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.config import KL_ESTIMATORS, KlControlConfig


def test_k1_and_k3_agree_in_expectation_with_the_exact_divergence() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.25, 0.25])
    exact = float((p * (p / q).log()).sum())

    for name in ("k1", "k3"):
        expected = float((p * kl_penalty(p.log(), q.log(), name)).sum())
        assert expected == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(name: str) -> None:
    ref = torch.tensor([-1.0, -2.0, -30.0])
    logprobs = torch.tensor([-1.5, -1.0, -1.0]).requires_grad_()

    plus = kl_penalty(logprobs, ref, name + "+")
    (gradient,) = torch.autograd.grad(plus.sum(), logprobs)

    torch.testing.assert_close(plus.detach(), kl_penalty(logprobs, ref, name).detach())
    torch.testing.assert_close(gradient, (logprobs - ref).detach())


def test_an_unknown_estimator_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="k1, abs"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


def test_the_adaptive_controller_follows_the_target_and_is_bounded() -> None:
    start = KlController.start(
        KlControlConfig(type="adaptive", kl_coef=0.1, horizon=100, target_kl=1.0)
    )

    assert start.updated(100.0, 50).value == pytest.approx(0.1 * (1 + 0.2 * 0.5))
    assert start.updated(0.0, 50).value == pytest.approx(0.1 * (1 - 0.2 * 0.5))
    assert start.updated(1.1, 50).value == pytest.approx(0.1 * (1 + 0.1 * 0.5))
    assert KlController.start(KlControlConfig(kl_coef=0.1)).updated(100.0, 50).value == 0.1


def test_log_probs_that_are_finite_and_absurd_do_not_end_the_controller() -> None:
    ragged = Ragged.from_lengths(
        torch.tensor([3, 3]), torch.ones(6, dtype=torch.bool), torch.tensor([0, 0])
    )
    controller = KlController.start(KlControlConfig(type="adaptive", kl_coef=0.5, horizon=10))
    most = torch.finfo(torch.float32).max
    ref_logprobs = torch.tensor([most] * 3 + [-most] * 3)

    result = kl_in_reward(
        ragged, torch.zeros(6), torch.zeros(6), ref_logprobs, name="k1", controller=controller
    )

    assert math.isnan(result.current_kl)
    assert result.controller.value == 0.5


def test_the_penalty_touches_trained_tokens_only_and_uses_the_coefficient_from_before() -> None:
    ragged = Ragged.from_lengths(
        torch.tensor([2, 2]), torch.tensor([True, True, True, False]), torch.tensor([0, 0])
    )
    controller = KlController.start(KlControlConfig(type="adaptive", kl_coef=0.5, horizon=10))

    result = kl_in_reward(
        ragged,
        torch.tensor([0.0, 1.0, 1.0, 7.0]),
        torch.tensor([-1.0, -1.0, -1.0, -1.0]),
        torch.tensor([-2.0, -1.0, -1.0, -9.0]),
        name="k1",
        controller=controller,
    )

    assert result.token_rewards.tolist() == [-0.5, 1.0, 1.0, 7.0]
    assert result.current_kl == pytest.approx(0.25)
    assert result.controller.value == pytest.approx(0.5 * (1 + 0.2 * 2 / 10))
