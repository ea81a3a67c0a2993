"""DAPO: clip higher, dynamic sampling, token-level loss, soft overlong penalty; no KL.

Yu et al. 2025, https://arxiv.org/abs/2503.14476, eqs. 8-13: ε_low = 0.2, ε_high = 0.28, groups of 16, the last fifth
of the length limit is the overlong buffer. The dual clip at 10 is the authors' code, not the paper. With n the
response's tokens, L_max the limit and the last `buffer` tokens before it, the reward gets (eq. 13)

    penalty = min(0, -(n - (L_max - buffer)) / buffer · factor)
"""

from __future__ import annotations

from meshrl.trainer.algorithms.lazy_torch import Tensor

DEFAULTS = {
    "algorithm": {
        "adv_estimator": "grpo",
        "filter_groups": {"enable": True, "metric": "reward", "max_num_gen_batches": 10},
        "overlong_buffer": {"enable": True, "penalty_factor": 1.0},
    },
    "actor": {
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": 10.0,
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "vanilla"},
        "use_kl_loss": False,
    },
    "rollout": {"n": 16},
}


def overlong_penalty(
    lengths: Tensor, *, max_response_length: int, buffer: int, factor: float = 1.0
) -> Tensor:
    """Penalty to add to the rewards, float32[B], never positive; `lengths` int64[B] in tokens."""
    over = lengths - (max_response_length - buffer)
    return (-over / buffer * factor).clamp(max=0)
