"""Options of `hgpo`."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt

from meshrl.common.config import Config


class HgpoConfig(Config):
    """HGPO: groups of steps that share their observation and ever more of what came before it."""

    history_length: NonNegativeInt = 2
    """Observations before a step's own that a group may share; 0: the observation alone."""
    length_weight_alpha: NonNegativeFloat = 1.0
    """How much more groups count whose steps share more: (shared observations + 1) to this power."""
    mode: Literal["mean_norm", "mean_std_norm"] = "mean_norm"
    """Subtract the group mean, or also divide by the group's standard deviation."""
    base_group: bool = False
    """Let the episode's advantage over its prompt's group count as well, with weight 1."""


class Options(Config):
    """Keys of `algorithm`."""

    hgpo: HgpoConfig = HgpoConfig()
