"""Options of `gigpo`."""

from __future__ import annotations

from typing import Literal

from meshrl.common.config import Config


class GigpoConfig(Config):
    """GiGPO: groups of steps that start from the same observation."""

    step_advantage_w: float = 1.0
    """Weight of the step advantage beside the episode's."""
    mode: Literal["mean_norm", "mean_std_norm"] = "mean_norm"
    """Subtract the group mean, or also divide by the group's standard deviation."""


class Options(Config):
    """Keys of `algorithm`."""

    gigpo: GigpoConfig = GigpoConfig()
