"""Configuration of the judges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt

from meshrl.contract.config import Config


class RewardFunctionConfig(Config):
    """One reward of the weighted sum."""

    name: str
    """A module of `meshrl.rewardd.rewards` (gsm8k, math, exact_match, format, length), or a dotted path."""
    weight: float = 1.0
    """Its factor in the sum."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """The reward's own options."""


class CustomRewardFunctionConfig(Config):
    """A reward function in a Python file of yours, with verl's signature."""

    path: Path | None = None
    """The file; null means that there is none."""
    name: str = "compute_score"
    """The function in it."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of every call."""


class RewardConfig(Config):
    """How answers are scored."""

    functions: list[RewardFunctionConfig] = Field(default_factory=list)
    """Built-in rewards; the score is their weighted sum."""
    custom_reward_function: CustomRewardFunctionConfig = CustomRewardFunctionConfig()
    """Your own reward function."""
    deadline_s: PositiveFloat = 30.0
    """Seconds one call may take before it counts as `timeout`."""
    workers: PositiveInt = 1
    """Processes that score."""
