"""Options of `prime`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from meshrl.common.config import Config
from meshrl.trainer.learner.optimizer_config import OptimConfig


class RewardModelOptimConfig(OptimConfig):
    """AdamW at a constant rate: the paper's. A recipe has keys for the rate, the decay and the gradient's norm."""

    name: Literal["adamw", "muon"] = Field(default="adamw", exclude=True)
    betas: tuple[float, float] = Field(default=(0.9, 0.999), exclude=True)
    eps: PositiveFloat = Field(default=1e-8, exclude=True)
    lr_warmup_steps: NonNegativeInt = Field(default=0, exclude=True)
    lr_warmup_init_ratio: NonNegativeFloat = Field(default=0.0, exclude=True)
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = Field(
        default="constant", exclude=True
    )
    min_lr_ratio: NonNegativeFloat = Field(default=0.0, exclude=True)
    lr_decay_steps: PositiveInt | None = Field(default=None, exclude=True)
    offload: bool = Field(default=False, exclude=True)


class PrimeConfig(Config):
    """PRIME: process rewards from an implicit reward model."""

    beta_train: PositiveFloat = 0.05
    """β of r_t = β (log π_φ - log π_ref)."""
    reward_dpo_coef: float = 5.0
    """Weight of the implicit process reward."""
    reward_gt_coef: float = 5.0
    """Weight of the verifier's outcome."""
    optim: RewardModelOptimConfig = RewardModelOptimConfig(lr=1e-6, clip_grad=10.0)
    """Of the implicit reward model π_φ, which starts as the policy does."""
    update: Literal["before", "after"] = "before"
    """Train π_φ on a batch before or after it scores the batch."""


class Options(Config):
    """Keys of `algorithm`."""

    prime: PrimeConfig = PrimeConfig()
