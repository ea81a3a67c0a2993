"""The options of an optimizer; in a file without torch, because recipes hold it."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from meshrl.common.config import Config


class OptimConfig(Config):
    """The optimizer and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: Muon on hidden matrices, AdamW on the rest, at one learning rate."""
    lr: PositiveFloat = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.01
    clip_grad: PositiveFloat = 1.0
    """Largest global gradient norm."""
    lr_warmup_steps: NonNegativeInt = 0
    lr_warmup_init_ratio: NonNegativeFloat = 0.0
    """Where the warm-up starts, as a share of `lr`."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    min_lr_ratio: NonNegativeFloat = 0.0
    lr_decay_steps: PositiveInt | None = None
    """The step, counted with the warm-up, from which on the rate is `lr * min_lr_ratio`; None: the last one."""
    offload: bool = False
    """Keep the optimizer's state in the CPU's memory but for the moment of a step, when activations are gone: it
    travels to the device and back at every step, and no number changes. `model.param_offload` keeps it there."""
