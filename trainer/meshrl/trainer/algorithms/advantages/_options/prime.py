"""Options of `prime`."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from meshrl.common.config import Config
from meshrl.trainer.learner.optimizer_config import OptimConfig


class PrimeConfig(Config):
    """PRIME: process rewards from an implicit reward model."""

    beta_train: PositiveFloat = 0.05
    """β of r_t = β (log π_φ - log π_ref)."""
    reward_dpo_coef: float = 5.0
    """Weight of the implicit process reward."""
    reward_gt_coef: float = 5.0
    """Weight of the verifier's outcome."""
    optim: OptimConfig = OptimConfig(lr=1e-6, clip_grad=10.0)
    """Of the implicit reward model π_φ, which starts as the policy does."""
    update: Literal["before", "after"] = "before"
    """Train π_φ on a batch before or after it scores the batch."""


class Options(Config):
    """Keys of `algorithm`."""

    prime: PrimeConfig = PrimeConfig()
