"""PPO with a learned critic: dense credit by GAE, a clipped ratio, a clipped value loss.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347; λ = 0.95 and γ = 1 are what language models use (Ouyang et al.
2022). The critic's head starts at 0; `critic.warmup_steps` lets it learn before the policy moves. Its clipped squared
error is the one of OpenAI's PPO, with R the returns of the estimator (not whitened) and V_old the values that the
advantages were computed with:

    V_clip = clip(V_φ, V_old - c, V_old + c)
    l = ½ max((V_φ - R)², (V_clip - R)²)
"""

from __future__ import annotations

from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.lazy_torch import Tensor, torch
from meshrl.trainer.algorithms.losses._types import LossOutput
from meshrl.trainer.algorithms.ragged import Ragged

DEFAULTS = {
    "algorithm": {"adv_estimator": "gae", "gamma": 1.0, "lam": 0.95},
    "actor": {
        "clip_ratio": 0.2,
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "vanilla"},
    },
    "critic": {"optim": {"lr": 1e-5}, "cliprange_value": 0.5},
    "rollout": {"n": 1},
}


def value_loss(
    ragged: Ragged,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    cliprange_value: float,
    aggregate: Aggregator,
) -> LossOutput:
    """Loss of predictions `values` [N], which carry the gradient."""
    c = cliprange_value
    clipped = torch.minimum(torch.maximum(values, old_values - c), old_values + c)
    plain_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    loss = torch.maximum(plain_error, clipped_error)
    with torch.no_grad():
        clipfrac = ragged.token_mean((clipped_error > plain_error).float())
        error = ragged.token_mean(plain_error)
        mean = ragged.token_mean(values)
    return LossOutput(
        loss=0.5 * aggregate(loss, ragged),
        metrics={
            "critic/vf_clipfrac": clipfrac,
            "critic/squared_error": error,
            "critic/vpred_mean": mean,
        },
    )
