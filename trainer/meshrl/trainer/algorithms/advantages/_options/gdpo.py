"""Options of `gdpo`."""

from __future__ import annotations

from pydantic import Field

from meshrl.common.config import Config


class Options(Config):
    """Keys of `algorithm`."""

    gdpo_reward_keys: list[str] = Field(default_factory=list)
    """Reward components that GDPO normalises one by one; none takes the reward itself."""
    gdpo_reward_weights: list[float] = Field(default_factory=list)
    """One weight per key; none weighs each 1."""
