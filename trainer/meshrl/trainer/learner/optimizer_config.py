"""The options of an optimizer; in a file without torch, because recipes hold it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from meshrl.common.config import Config


def _share(beta: float) -> float:
    if not 0 <= beta < 1:
        raise ValueError("want a number from 0 to below 1")
    return beta


Beta = Annotated[float, AfterValidator(_share)]


class OptimConfig(Config):
    """The optimizer and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: Muon on hidden matrices, AdamW on the rest, at one learning rate."""
    lr: PositiveFloat = 1e-6
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.01
    clip_grad: PositiveFloat = 1.0
    """Largest global gradient norm."""
    lr_warmup_steps: NonNegativeInt = 0
    lr_warmup_init_ratio: NonNegativeFloat = 0.0
    """Learning rate at the start of the warm-up, as a share of `lr`."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    min_lr_ratio: NonNegativeFloat = 0.0
    lr_decay_steps: PositiveInt | None = None
    """The step, counted with the warm-up, from which on the rate is `lr * min_lr_ratio`; None: the last one."""
    offload: bool = False
    """Keep the optimizer's state in the CPU's memory but for the moment of a step, when activations are gone: it
    travels to the device and back at every step, and no number changes. `model.param_offload` keeps it there."""

    def oddities(self, steps: int | None) -> Iterator[tuple[str, str]]:
        """Keys of a schedule that is hardly meant, each with a sentence; `steps` of the run, None: not known."""
        warm, end = self.lr_warmup_steps, self.lr_decay_steps
        if steps is not None and warm > steps:
            yield "lr_warmup_steps", f"{warm}, and the run has {steps} steps: lr is never reached"
        if end is not None and self.lr_scheduler_type == "constant":
            yield (
                "lr_decay_steps",
                "lr_scheduler_type is constant, which does not decay; want cosine or linear",
            )
        elif end is not None and end <= warm:
            yield (
                "lr_decay_steps",
                f"{end}, and lr_warmup_steps is {warm}, counted with it: want more",
            )
        if self.min_lr_ratio > 1:
            yield (
                "min_lr_ratio",
                f"{self.min_lr_ratio:g}: the rate rises to the end; want at most 1",
            )
