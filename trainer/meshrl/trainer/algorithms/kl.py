"""Estimators of KL(π || π_ref) from log-probs of sampled tokens, and the penalty in the reward.

Schulman, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html), with
d = log π - log π_ref at a token sampled from π:

    kl, k1           d                      unbiased, any sign
    abs              |d|
    mse, k2          d²/2                   biased value, unbiased gradient
    low_var_kl, k3   exp(-d) - 1 + d        unbiased, never negative

The expectation of the gradient of k1 and k3 is not the gradient of the KL. A `+` behind any name keeps
the value and takes the gradient of k2 instead (straight-through).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from meshrl.contract.errors import ConfigError
from meshrl.trainer.algorithms.ragged import LOG_RATIO_BOUND, Ragged
from meshrl.trainer.config import KL_ESTIMATORS, KlControlConfig

K3_BOUND = 10.0


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, name: str) -> Tensor:
    """KL estimate per token, any shape; `k3` has no gradient where its clamps bind, `k3+` has.

    Raises:
        ConfigError: `name` is no estimator.
    """
    base = name.removesuffix("+")
    value = _estimate(logprobs, ref_logprobs, base)
    if base == name:
        return value
    k2 = (logprobs - ref_logprobs).square() / 2
    return k2 - k2.detach() + value.detach()


def _estimate(logprobs: Tensor, ref_logprobs: Tensor, name: str) -> Tensor:
    d = logprobs - ref_logprobs
    match name:
        case "kl" | "k1":
            return d
        case "abs":
            return d.abs()
        case "mse" | "k2":
            return d.square() / 2
        case "low_var_kl" | "k3":
            x = (-d).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            return (x.exp() - x - 1).clamp(-K3_BOUND, K3_BOUND)
        case _:
            raise ConfigError(
                f"no KL estimator named {name!r} (known: {', '.join(KL_ESTIMATORS)}; each also with +)"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class KlController:
    """The coefficient β of the penalty in the reward; `updated` returns the next one.

    Adaptive (Ziegler et al. 2019, https://arxiv.org/abs/1909.08593):
    β ← β (1 + clip(KL/target - 1, -0.2, 0.2) · rows/horizon).
    """

    config: KlControlConfig
    value: float

    @classmethod
    def start(cls, config: KlControlConfig) -> KlController:
        """The controller before the first step."""
        return cls(config=config, value=config.kl_coef)

    def updated(self, current_kl: float, num_rows: int) -> KlController:
        """The controller after a step on `num_rows` rows with mean KL `current_kl` (nats per token).

        Of a step whose KL is not finite, which changes no weights either, nothing is learned.
        """
        if self.config.type == "fixed" or not math.isfinite(current_kl):
            return self
        error = min(max(current_kl / self.config.target_kl - 1, -0.2), 0.2)
        value = self.value * (1 + error * num_rows / self.config.horizon)
        return KlController(config=self.config, value=value)


@dataclass(frozen=True, kw_only=True, slots=True)
class PenalisedRewards:
    """Result of `kl_in_reward`."""

    token_rewards: Tensor
    """float32[N]: r_t = score_t - β · KL_t at trained tokens, score_t at masked ones."""
    current_kl: float
    """Mean over rows of the mean KL of a row's tokens, nats."""
    controller: KlController
    """For the next step; this step used the coefficient from before."""


def kl_in_reward(
    ragged: Ragged,
    token_scores: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    name: str,
    controller: KlController,
) -> PenalisedRewards:
    """Subtract β · KL from every trained token's reward; all inputs float32[N]."""
    with torch.no_grad():
        kl = kl_penalty(old_logprobs, ref_logprobs, name)
        kl = torch.where(ragged.mask, kl, kl.new_zeros(()))
        current = float(ragged.row_mean(kl).mean()) if ragged.num_rows else 0.0
        return PenalisedRewards(
            token_rewards=token_scores - controller.value * kl,
            current_kl=current,
            controller=controller.updated(current, ragged.num_rows),
        )
