"""Options of `kl_cov`."""

from __future__ import annotations

from meshrl.common.config import Config


class Options(Config):
    """Keys of `actor.policy_loss`."""

    kl_cov_ratio: float = 2e-4
    """Share of the tokens that are penalised, those of the largest covariance."""
    ppo_kl_coef: float = 0.1
    """Weight of their KL penalty."""
