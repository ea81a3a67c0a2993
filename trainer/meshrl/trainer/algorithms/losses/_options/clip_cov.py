"""Options of `clip_cov`."""

from __future__ import annotations

from meshrl.common.config import Config


class Options(Config):
    """Keys of `actor.policy_loss`."""

    clip_cov_ratio: float = 2e-4
    """Share of the tokens that get no gradient."""
    clip_cov_lb: float = 1.0
    """They are drawn from the tokens with a covariance above this."""
    clip_cov_ub: float = 5.0
    """And below this."""
