"""GPG: group policy gradient, rescaled for the prompts that give no gradient.

Chu et al. 2025, https://arxiv.org/abs/2504.02546:

    A_i = α (s_i - mean_g(s)) / f_norm
    α   = rows / rows with s ≠ 0          over the whole batch

f_norm = 1. Trained with the plain policy gradient: `policy_loss.loss_mode: gpg`.
"""

from __future__ import annotations

from meshrl.trainer.algorithms.advantages._types import (
    AdvantageBatch,
    Advantages,
    AlgorithmConfig,
    Conventions,
    broadcast,
)
from meshrl.trainer.algorithms.advantages.grpo import group_relative
from meshrl.trainer.algorithms.lazy_torch import Tensor
from meshrl.trainer.algorithms.ragged import Ragged

GROUP_BASELINE = True
DEFAULTS = {
    "algorithm": {"adv_estimator": "gpg"},
    "actor": {
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "gpg"},
        "use_kl_loss": False,
    },
    "rollout": {"n": 8},
    "queue": {"max_staleness": 0},
}
"""No surrogate, no clip, no KL, no critic; `queue.max_staleness` is 0, because the loss has no ratio."""


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Advantages of whole responses."""
    return broadcast(batch, rescaled(batch.ragged, batch.scores, conventions=config.conventions))


def rescaled(ragged: Ragged, s: Tensor, *, conventions: Conventions, f_norm: float = 1.0) -> Tensor:
    """A [B] from s [B]."""
    alpha = ragged.num_rows / s.count_nonzero().clamp(min=1)
    centred = group_relative(ragged, s, divide_by_std=False, conventions=conventions)
    return alpha * centred / f_norm
