"""GAE: exponentially weighted temporal differences of a learned value function; with a clipped ratio it is PPO.

Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16:

    δ_t = r_t + γ V_{t+1} - V_t
    A_t = δ_t + γ λ A_{t+1}
    R_t = A_t + V_t                       what the critic learns
    advantages = whiten(A)                over the trained tokens of the whole batch

t counts trained tokens: a tool's tokens are skipped, so a value is compared with the next sampled token's.

PPO: Schulman et al. 2017, https://arxiv.org/abs/1707.06347. The critic's clipped squared error is the one of
OpenAI's, with V_old the values that the advantages were computed with:

    V_clip = clip(V_φ, V_old - c, V_old + c)
    l = ½ max((V_φ - R)², (V_clip - R)²)
"""

from __future__ import annotations

from meshrl.common.config import Config
from meshrl.trainer.algorithms.advantages._types import AdvantageBatch, Advantages, AlgorithmConfig
from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.lazy_torch import Tensor, torch
from meshrl.trainer.algorithms.losses._types import LossOutput
from meshrl.trainer.algorithms.options import need, options
from meshrl.trainer.algorithms.ragged import Ragged, whiten


class Options(Config):
    """Keys of `algorithm`."""

    lam: float = 1.0
    """λ of GAE: 1 takes whole returns, 0 one-step differences."""


NEEDS = ("values",)
NAME = "ppo"
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
"""λ = 0.95 and γ = 1 are what language models use (Ouyang et al. 2022). The critic's head starts at 0;
`critic.warmup_steps` lets it learn before the policy moves."""


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """Whitened advantages and the critic's returns.

    Raises:
        ConfigError: no values.
    """
    ragged = batch.ragged
    values = need(batch.values, "values", "algorithm.adv_estimator gae")
    lam = options(config, Options).lam
    lam_B = torch.full((ragged.num_rows,), lam, device=values.device)
    A = gae(ragged, batch.token_rewards, values, gamma=config.gamma, lam=lam_B)
    returns = torch.where(ragged.mask, A + values, 0.0)
    return Advantages(advantages=whiten(ragged, A), returns=returns)


def gae(ragged: Ragged, r: Tensor, V: Tensor, *, gamma: float, lam: Tensor) -> Tensor:
    """A [N] from rewards and values [N] and one λ per row [B]; 0 at masked tokens."""
    steps = ragged.valid_only()
    r, V = r[ragged.mask].double(), V[ragged.mask].double()
    delta = r + gamma * steps.next_in_row(V) - V
    A = steps.discounted_suffix_sum(delta, gamma * lam.double()[steps.rows])
    return ragged.from_valid(A.float())


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
