"""Configuration of the studio. Imports no torch."""

from __future__ import annotations

from typing import Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from meshrl.contract.config import Config
from meshrl.contract.nouns import OnUpdate


class ValidationSamplingConfig(Config):
    """How held-out prompts are answered."""

    n: PositiveInt = 1
    """Answers per prompt."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = -1
    """-1 is off."""


class RolloutConfig(Config):
    """How answers are sampled, and by how many workers."""

    name: str = "torch"
    """A module of `meshrl.rollout.engines` (torch, vllm), or a dotted path."""
    n: PositiveInt = 8
    """Answers per prompt: the group that advantages are relative to."""
    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = -1
    """-1 is off."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end an answer."""
    program: str = "single_turn"
    """A module of `meshrl.rollout.programs`, or a dotted path."""
    workers: PositiveInt = 1
    """Processes, each with an engine of its own."""
    slots: PositiveInt = 64
    """Requests running at once in one worker."""
    on_update: OnUpdate = OnUpdate.IN_FLIGHT
    """What a running answer does when new weights arrive."""
    deadline_s: PositiveFloat = 600.0
    """Seconds one answer may take before it counts as `timeout`."""
    deterministic: bool | None = None
    """The same rows share a forward pass in every execution; null: exactly when `queue.max_staleness` is 0."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """The engine's own options: the `Config` in its module."""
    val_kwargs: ValidationSamplingConfig = ValidationSamplingConfig()
    """Sampling of held-out prompts."""
