"""Options of the estimator `sppo`."""

from __future__ import annotations

from pydantic import NonNegativeFloat

from meshrl.common.config import Config


class Options(Config):
    """Keys of `algorithm`."""

    sppo_beta: NonNegativeFloat = 1.0
    """Inverse temperature of the soft mean that SPPO subtracts; 0 takes the mean."""
