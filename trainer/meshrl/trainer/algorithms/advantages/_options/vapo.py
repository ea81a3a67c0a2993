"""Options of `vapo`."""

from __future__ import annotations

from pydantic import PositiveFloat

from meshrl.common.config import Config


class VapoConfig(Config):
    """VAPO: two λ, 1 for the returns that the critic learns and a length-adaptive one for the actor."""

    alpha: PositiveFloat = 0.05
    """λ of the actor is 1 - 1/(α · response length)."""


class Options(Config):
    """Keys of `algorithm`."""

    vapo: VapoConfig = VapoConfig()
