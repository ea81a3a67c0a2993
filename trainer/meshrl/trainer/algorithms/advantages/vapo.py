"""VAPO: decoupled, length-adaptive GAE.

Yue et al. 2025, https://arxiv.org/abs/2504.05118:

    critic   R = A(λ = 1) + V                     unbiased returns for the value function
    actor    A(λ_i),  λ_i = 1 - 1/(α L_i)         the longer the response, the further credit reaches

with α = 0.05 and L_i the trained tokens of row i. λ_i is not below 0: rows shorter than 1/α get one-step advantages.
Advantages are whitened over the batch as in GAE. The paper's other parts are settings: value pre-training,
clip-higher, token-mean, NLL on correct answers (positive_nll_coef 0.1).
"""

from __future__ import annotations

from pydantic import PositiveFloat

from meshrl.common.config import Config
from meshrl.trainer.algorithms.advantages._types import AdvantageBatch, Advantages, AlgorithmConfig
from meshrl.trainer.algorithms.advantages.gae import gae
from meshrl.trainer.algorithms.lazy_torch import torch
from meshrl.trainer.algorithms.options import need, options
from meshrl.trainer.algorithms.ragged import whiten


class VapoConfig(Config):
    """VAPO: two λ, 1 for the returns that the critic learns and a length-adaptive one for the actor."""

    alpha: PositiveFloat = 0.05
    """λ of the actor is 1 - 1/(α · response length)."""


class Options(Config):
    """Keys of `algorithm`."""

    vapo: VapoConfig = VapoConfig()


NEEDS = ("values",)
DEFAULTS = {
    "algorithm": {
        "adv_estimator": "vapo",
        "gamma": 1.0,
        "vapo": {"alpha": 0.05},
    },
    "actor": {
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "vanilla", "positive_nll_coef": 0.1},
    },
    "critic": {"optim": {"lr": 2e-6}, "pretrain_steps": 50},
    "rollout": {"n": 16},
}
"""50 steps of value pre-training on Monte Carlo returns, λ = 1 for the critic, 1 - 1/(0.05 L) for the
actor, ε 0.2/0.28, token-level loss, weight 0.1 of the NLL, groups of 16, learning rates 1e-6 and 2e-6."""


def compute(batch: AdvantageBatch, config: AlgorithmConfig) -> Advantages:
    """The actor's whitened advantages and the critic's returns.

    Raises:
        ConfigError: no values.
    """
    ragged, r, gamma = batch.ragged, batch.token_rewards, config.gamma
    V = need(batch.values, "values", "algorithm.adv_estimator vapo")
    L = ragged.valid_lengths.double()
    vapo = options(config, Options).vapo
    lam_actor = (1 - 1 / (vapo.alpha * L.clamp(min=1))).clamp(min=0)
    lam_critic = torch.ones_like(lam_actor)
    A = gae(ragged, r, V, gamma=gamma, lam=lam_actor)
    R = torch.where(ragged.mask, gae(ragged, r, V, gamma=gamma, lam=lam_critic) + V, 0.0)
    metrics = {"advantages/vapo_lambda_mean": float(lam_actor.mean())}
    return Advantages(advantages=whiten(ragged, A), returns=R, metrics=metrics)
