"""The proximal policy of decoupled PPO without a forward pass: between the sampling policy and the trained one.

Hilton et al. 2021, https://arxiv.org/abs/2110.00641, clip around a proximal policy that need not have sampled.
Recomputing it costs one forward pass of the batch; the log-linear interpolation (A-3PO, Li et al. 2025,
https://arxiv.org/abs/2512.06547) costs none:

    log π_prox = α log π_behaviour + (1 - α) log π_θ,     α = 1/d,  d = versions between the two

d = 0 or 1 keeps the sampling policy (d = 1 is one-step-off); the staler a token, the closer the anchor to π_θ.
"""

from __future__ import annotations

from torch import Tensor


def interpolate(rollout_logprobs: Tensor, logprobs: Tensor, staleness: Tensor) -> Tensor:
    """Log π_prox float32[N], detached; `staleness` int64[N] counts versions per token."""
    alpha = 1 / staleness.clamp(min=1)
    return alpha * rollout_logprobs + (1 - alpha) * logprobs.detach()
