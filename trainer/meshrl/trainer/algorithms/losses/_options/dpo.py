"""Options of `dpo`, `ipo` and `spin`."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat

from meshrl.common.config import Config


class Options(Config):
    """Keys of `actor.policy_loss`."""

    dpo_beta: PositiveFloat = 0.1
    """β of `dpo`, `ipo` and `spin`."""
    dpo_label_smoothing: NonNegativeFloat = 0.0
    """Probability that a preference is the wrong way round (conservative DPO)."""
    dpo_reference_free: bool = False
    """Leave the reference model out of `dpo` and `ipo`."""
