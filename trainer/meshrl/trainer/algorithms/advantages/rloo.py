"""RLOO: the baseline of a response is the mean of its siblings.

Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740:

    A_i = s_i - 1/(n - 1) Σ_{j ≠ i} s_j  =  (s_i - mean_g(s)) · n/(n - 1)

`rloo_vectorized` is verl's other name for it.
"""

from __future__ import annotations

from meshrl.trainer.algorithms.advantages._types import (
    AdvantageBatch,
    Advantages,
    AlgorithmConfig,
    broadcast,
)
from meshrl.trainer.algorithms.lazy_torch import Tensor, torch
from meshrl.trainer.algorithms.ragged import Ragged

GROUP_BASELINE = True
DEFAULTS = {
    "algorithm": {
        "adv_estimator": "rloo",
        "use_kl_in_reward": True,
        "kl_ctrl": {"type": "fixed", "kl_coef": 0.03},
        "rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    },
    "actor": {"loss_agg_mode": "token-mean", "policy_loss": {"loss_mode": "reinforce"}},
    "rollout": {"n": 4},
}
"""β = 0.03 (their TL;DR setting). Asynchronous rows are weighed by a truncated
π_old/π_rollout; with `queue.max_staleness: 0` the weights are 1 up to rounding."""


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Advantages of whole responses.

    A row without siblings gets 0; under verl's conventions its reward, but 0 from `rloo_vectorized`.
    """
    A = leave_one_out(batch.ragged, batch.scores)
    if config.conventions == "verl" and config.adv_estimator != "rloo_vectorized":
        A = torch.where(batch.ragged.alone, batch.scores.double(), A)
    return broadcast(batch, A)


def leave_one_out(ragged: Ragged, s: Tensor) -> Tensor:
    """A [B] from s [B]; 0 for a row without siblings."""
    s = s.double()
    g = ragged.groups
    n = ragged.group_counts[g]
    return (s - ragged.group_mean(s)[g]) * n / (n - 1).clamp(min=1)
