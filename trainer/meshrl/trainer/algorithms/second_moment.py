"""M2PO: mask the few tokens that carry the second moment of the importance ratio.

Zheng et al. 2025, "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?",
https://arxiv.org/abs/2510.01161:

    M₂ = mean over tokens of (log π_θ - log π_behaviour)²        a bound on the χ² divergence

Tokens are masked from the largest (log ratio)² down until the mean of the rest is at most τ. The rest is
trained unclipped, so informative tokens of stale rows survive where a clip would silence them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshrl.trainer.algorithms.ragged import Ragged


@torch.no_grad()
def second_moment_mask(ragged: Ragged, log_ratio: Tensor, threshold: float) -> Tensor:
    """bool[N]: the most trained tokens whose mean squared log-ratio [N] is at most `threshold`.

    Equal squares stay or go in the order of the tokens.
    """
    valid = ragged.mask.nonzero().squeeze(1)
    squares = log_ratio[valid].double().square()
    ascending, order = squares.sort(stable=True)
    counts = torch.arange(1, len(valid) + 1, device=valid.device)
    # The running mean of an ascending sequence never falls, so the kept ones are a prefix.
    keep = ascending.cumsum(0) / counts <= threshold
    mask = torch.zeros_like(ragged.mask)
    mask[valid[order[keep]]] = True
    return mask
