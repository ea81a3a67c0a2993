"""OPO: on-policy RL with the baseline that minimises the variance of the gradient.

Hao et al. 2025, https://arxiv.org/abs/2505.23585, with the gradient's norm taken to grow with length:

    b_g = Σ_g L_j s_j / Σ_g L_j
    A_i = s_i - b_g

The paper trains exactly on-policy, without KL and entropy terms.
"""

from __future__ import annotations

from meshrl.trainer.algorithms.advantages._types import (
    AdvantageBatch,
    Advantages,
    AlgorithmConfig,
    broadcast,
)
from meshrl.trainer.algorithms.lazy_torch import torch

GROUP_BASELINE = True
DEFAULTS = {
    "algorithm": {"adv_estimator": "opo"},
    "actor": {
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "reinforce"},
        "use_kl_loss": False,
        "entropy_coeff": 0.0,
    },
    "rollout": {"n": 8},
    "queue": {"max_staleness": 0},
}
"""No clip, no KL, no entropy bonus; `queue.max_staleness` is 0, because the loss has no ratio."""


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Advantages of whole responses.

    A row without siblings gets 0; under verl's conventions its reward.
    """
    ragged, s = batch.ragged, batch.scores.double()
    g, L = ragged.groups, ragged.valid_lengths.double()
    b = ragged.group_sum(L * s) / ragged.group_sum(L).clamp(min=1)
    A = s - b[g]
    return broadcast(
        batch, torch.where(ragged.alone, s if config.conventions == "verl" else 0.0, A)
    )
