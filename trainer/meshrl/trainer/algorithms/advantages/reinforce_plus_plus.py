"""REINFORCE++: discounted returns, whitened over the whole batch instead of a critic or groups.

Hu 2025, https://arxiv.org/abs/2501.03262:

    R_t = r_t + γ R_{t+1}
    A = whiten(R)                         over the trained tokens of the whole batch

r usually carries the KL penalty (`use_kl_in_reward`). t counts trained tokens.
"""

from __future__ import annotations

from meshrl.trainer.algorithms.advantages._types import AdvantageBatch, Advantages, AlgorithmConfig
from meshrl.trainer.algorithms.lazy_torch import torch
from meshrl.trainer.algorithms.ragged import whiten

DEFAULTS = {
    "algorithm": {
        "adv_estimator": "reinforce_plus_plus",
        "gamma": 1.0,
        "use_kl_in_reward": True,
        "kl_penalty": "k1",
        "kl_ctrl": {"type": "fixed", "kl_coef": 0.01},
    },
    "actor": {
        "clip_ratio": 0.2,
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "vanilla"},
    },
    "rollout": {"n": 1},
}
"""k1 as the KL estimator and β = 0.01."""


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Whitened advantages and the discounted returns."""
    ragged = batch.ragged
    r = batch.token_rewards[ragged.mask].double()
    R = ragged.valid_only().discounted_suffix_sum(r, torch.full_like(r, config.gamma))
    returns = ragged.from_valid(R.float())
    return Advantages(advantages=whiten(ragged, returns), returns=returns)
