"""Options of `sapo`."""

from __future__ import annotations

from meshrl.common.config import Config


class Options(Config):
    """Keys of `actor.policy_loss`."""

    tau_pos: float = 1.0
    """SAPO's gate for positive advantages."""
    tau_neg: float = 1.05
    """SAPO's gate for the others."""
