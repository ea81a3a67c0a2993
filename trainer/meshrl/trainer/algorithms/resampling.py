"""PF-PPO: resample the rows of a batch in proportion to how much their reward can be trusted.

Shen et al. 2024, "Policy Filtration for RLHF", https://arxiv.org/abs/2409.06957: a reward model is most reliable
at the ends of its range, so train on rows drawn with replacement with probability proportional to

    pow          |s|^p
    max_min      1 for rows at the maximum or the minimum, else 0
    max_random   0.4 for rows at the maximum, else 0.1

after the advantages have been computed; s is the reward before the KL penalty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshrl.trainer.config import PfPpoConfig

FLOOR = 1e-8
"""Added to every weight, so that a batch of zeros can be sampled."""


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
