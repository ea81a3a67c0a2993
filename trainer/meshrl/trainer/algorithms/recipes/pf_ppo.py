"""PF-PPO: PPO on rows drawn by how far their reward can be trusted: the ends of a reward model's range.

Shen et al. 2024, "Policy Filtration for RLHF", https://arxiv.org/abs/2409.06957: a reward model is most reliable at
the ends of its range, so train on rows drawn with replacement with probability proportional to

    pow          |s|^p
    max_min      1 for rows at the maximum or the minimum, else 0
    max_random   0.4 for rows at the maximum, else 0.1

after the advantages have been computed; s is the reward before the KL penalty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshrl.trainer.algorithms.lazy_torch import Tensor, torch

if TYPE_CHECKING:
    from meshrl.trainer.config import PfPpoConfig

FLOOR = 1e-8
"""Added to every weight, so that a batch of zeros can be sampled."""

DEFAULTS = {
    "algorithm": {
        "adv_estimator": "gae",
        "gamma": 1.0,
        "lam": 0.95,
        "use_pf_ppo": True,
        "pf_ppo": {"reweight_method": "pow", "weight_pow": 2.0},
    },
    "actor": {
        "clip_ratio": 0.2,
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "vanilla"},
    },
    "critic": {"optim": {"lr": 1e-5}, "cliprange_value": 0.5},
    "rollout": {"n": 4},
}


def weights(s: Tensor, config: PfPpoConfig) -> Tensor:
    """Sampling weights float32[B] of rewards s [B]."""
    match config.reweight_method:
        case "pow":
            w = s.abs().pow(config.weight_pow)
        case "max_min":
            w = ((s == s.max()) | (s == s.min())).float()
        case "max_random":
            w = torch.where(s == s.max(), 0.4, 0.1)
    return (w + FLOOR).clamp(min=FLOOR)


def resample(s: Tensor, config: PfPpoConfig, *, generator: torch.Generator | None = None) -> Tensor:
    """int64[B]: the rows to train on, drawn with replacement; None draws from torch's own generator."""
    w = weights(s, config)
    return torch.multinomial(w, len(w), replacement=True, generator=generator)
