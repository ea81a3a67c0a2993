"""PRIME: leave-one-out over process rewards of an implicit reward model and over the verifier's outcome.

Cui et al. 2025, https://arxiv.org/abs/2502.01456; Yuan et al. 2024, https://arxiv.org/abs/2412.01981. The log-ratio
of a language model π_φ to its reference is a process reward,

    q_t = log π_φ(y_t) - log π_ref(y_t),     r_t = β q_t

and π_φ is trained on the outcomes (acc in {0, 1}) of the same rollouts, with cross-entropy or with a pairwise loss:

    RLOO(r)_t = n/(n - 1) r_t - 1/(n - 1) Σ_j mean_t(r^j)          n rows of the group
    R_t = Σ_{t' ≥ t} [ c_dpo RLOO(r)_t' + c_gt RLOO(acc at the last token)_t' ]
    A   = whiten(R)                                                over the trained tokens of the whole batch
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from meshrl.common.config import Config
from meshrl.trainer.algorithms.advantages import rloo
from meshrl.trainer.algorithms.advantages._types import (
    AdvantageBatch,
    Advantages,
    AlgorithmConfig,
    group_metrics,
    outcome_rewards,
)
from meshrl.trainer.algorithms.lazy_torch import Tensor, torch
from meshrl.trainer.algorithms.options import need, options
from meshrl.trainer.algorithms.ragged import Ragged, whiten
from meshrl.trainer.learner.optimizer_config import OptimConfig


class RewardModelOptimConfig(OptimConfig):
    """AdamW at a constant rate: the paper's. A recipe has keys for the rate, the decay and the gradient's norm."""

    name: Literal["adamw", "muon"] = Field(default="adamw", exclude=True)
    betas: tuple[float, float] = Field(default=(0.9, 0.999), exclude=True)
    eps: PositiveFloat = Field(default=1e-8, exclude=True)
    lr_warmup_steps: NonNegativeInt = Field(default=0, exclude=True)
    lr_warmup_init_ratio: NonNegativeFloat = Field(default=0.0, exclude=True)
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = Field(
        default="constant", exclude=True
    )
    min_lr_ratio: NonNegativeFloat = Field(default=0.0, exclude=True)
    lr_decay_steps: PositiveInt | None = Field(default=None, exclude=True)
    offload: bool = Field(default=False, exclude=True)


class PrimeConfig(Config):
    """PRIME: process rewards from an implicit reward model."""

    beta_train: PositiveFloat = 0.05
    """β of r_t = β (log π_φ - log π_ref)."""
    reward_dpo_coef: float = 5.0
    """Weight of the implicit process reward."""
    reward_gt_coef: float = 5.0
    """Weight of the verifier's outcome."""
    optim: RewardModelOptimConfig = RewardModelOptimConfig(lr=1e-6, clip_grad=10.0)
    """Optimizer of the implicit reward model π_φ, which starts as the policy does."""
    update: Literal["before", "after"] = "before"
    """Train π_φ on a batch before or after it scores the batch."""


class Options(Config):
    """Keys of `algorithm`."""

    prime: PrimeConfig = PrimeConfig()


NEEDS = ("implicit_rewards",)
ACCURACY = "acc"
"""The reward component that is the outcome; without it the reward itself is."""
DEFAULTS = {
    "algorithm": {
        "adv_estimator": "prime",
        "prime": {
            "beta_train": 0.05,
            "reward_dpo_coef": 5.0,
            "reward_gt_coef": 5.0,
            "optim": {"lr": 1e-6},
            "update": "before",
        },
        "filter_groups": {"enable": True, "low": 0.2, "high": 0.8, "oversample": 4.0},
    },
    "actor": {
        "clip_ratio": 0.2,
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "vanilla"},
    },
    "rollout": {"n": 4},
}
"""β = 0.05, weights 5 and 5 of process and outcome, the reward model is updated before it scores,
four times as many prompts as needed, those of accuracy 0.2 to 0.8 are trained. Rewards must be 0 or 1."""


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Whitened advantages and their returns.

    Raises:
        ConfigError: no implicit rewards.
    """
    ragged, prime = batch.ragged, options(config, Options).prime
    r = need(batch.implicit_rewards, "implicit_rewards", "algorithm.adv_estimator prime")
    acc = batch.reward_components.get(ACCURACY, batch.scores)
    outcome = outcome_rewards(ragged, rloo.leave_one_out(ragged, acc))
    source = prime.reward_dpo_coef * leave_one_out(ragged, r) + prime.reward_gt_coef * outcome
    R = ragged.suffix_sum(torch.where(ragged.mask, source, 0.0))
    returns = torch.where(ragged.mask, R, 0.0).float()
    return Advantages(
        advantages=whiten(ragged, returns), returns=returns, metrics=group_metrics(batch)
    )


def leave_one_out(ragged: Ragged, r: Tensor) -> Tensor:
    """RLOO(r) float64[N] of rewards at the trained tokens of `ragged`; 0 elsewhere and for lone rows."""
    r = r.double()
    n = ragged.group_counts[ragged.groups].double()
    row_mean = ragged.row_sum(r) / ragged.valid_lengths.clamp(min=1)
    others = (n - 1).clamp(min=1)
    b = ragged.group_sum(row_mean)[ragged.groups] / others
    centred = r * (n / others)[ragged.rows] - b[ragged.rows]
    return torch.where(ragged.mask & ~ragged.alone[ragged.rows], centred, 0.0)


def process_rewards(ragged: Ragged, q: Tensor, *, beta: float) -> Tensor:
    """R float32[N] from q [N]: the last trained token of a row gets none, the outcome is paid there.

    Divided by the largest |reward to go| of the batch, so that β does not set the scale of advantages.
    """
    with torch.no_grad():
        r = beta * q[ragged.mask]
        steps = ragged.valid_only()
        last = steps.positions == steps.lengths[steps.rows] - 1
        r = torch.where(last, 0.0, r)
        to_go = steps.suffix_sum(r)
        largest = to_go.abs().max() if len(to_go) else torch.zeros(())
        return ragged.from_valid(r / (largest + 1e-6))


def row_cross_entropy(ragged: Ragged, q: Tensor, acc: Tensor, *, beta: float) -> Tensor:
    """BCE(σ(β Σ_t q_t), acc) of each row [B]: q [N], acc [B] in [0, 1]."""
    Q = beta * ragged.row_sum(q)
    return torch.nn.functional.binary_cross_entropy_with_logits(Q, acc, reduction="none")
