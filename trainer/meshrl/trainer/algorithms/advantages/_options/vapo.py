"""Options of `vapo`."""

from __future__ import annotations

from pydantic import PositiveFloat

from meshrl.contract.config import Config


class VapoConfig(Config):
    """VAPO: two λ, one for the critic and a length-adaptive one for the actor."""

    lam_critic: float = 1.0
    """λ of the returns that the critic learns."""
    alpha: PositiveFloat = 0.05
    """λ of the actor is 1 - 1/(α · response length)."""


class Options(Config):
    """Keys of `algorithm`."""

    vapo: VapoConfig = VapoConfig()
