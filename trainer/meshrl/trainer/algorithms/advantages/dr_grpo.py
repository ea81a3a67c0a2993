"""Dr. GRPO: GRPO without the division by the group's standard deviation.

Liu et al. 2025, https://arxiv.org/abs/2503.20783:

    A_i = s_i - mean_g(s)

Dividing by the standard deviation weighs prompts that are too easy or too hard up. The paper's other half is in the
loss: `loss_agg_mode: seq-mean-token-sum-norm`, so that long wrong answers are not punished less per token.
"""

from __future__ import annotations

from meshrl.trainer.algorithms.advantages._types import (
    AdvantageBatch,
    Advantages,
    AlgorithmConfig,
    broadcast,
)
from meshrl.trainer.algorithms.advantages.grpo import group_relative

GROUP_BASELINE = True
DEFAULTS = {
    "algorithm": {"adv_estimator": "dr_grpo"},
    "actor": {
        "clip_ratio": 0.2,
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "policy_loss": {"loss_mode": "vanilla"},
        "use_kl_loss": False,
    },
    "rollout": {"n": 8},
}
"""The sum of a response is divided by a constant: `actor.loss_scale_factor`, or the longest response
that is allowed. No KL."""


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Advantages of whole responses; `norm_adv_by_std_in_grpo` is not read."""
    row_advantages = group_relative(
        batch.ragged, batch.scores, divide_by_std=False, conventions=config.conventions
    )
    return broadcast(batch, row_advantages)
