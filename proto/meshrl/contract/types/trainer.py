"""How training does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from meshrl.contract.types.rows import Version


class TrainerPhase(StrEnum):
    """What a trainer does now."""

    STARTING = "starting"
    WAITING = "waiting"
    """For rows, or for the weight plane: `TrainerStatus.waiting_for` says which."""
    TRAINING = "training"
    PUBLISHING = "publishing"
    EVALUATING = "evaluating"
    CHECKPOINTING = "checkpointing"
    DONE = "done"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """True when nothing will change any more."""
        return self in (TrainerPhase.DONE, TrainerPhase.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    """How training does."""

    step: int
    """Optimizer steps done."""
    total_steps: int
    """Optimizer steps planned; 0 while unknown."""
    version: Version
    """The version that these steps have made."""
    phase: TrainerPhase
    reward_mean: float | None = None
    """Mean reward of the last batch; None before the first."""
    held_out_score: float | None = None
    """The last held-out score; None before the first evaluation."""
    tokens_per_s: float = 0.0
    """Trained tokens a second, over the last steps."""
    samples: int = 0
    """Rows trained since the start of the run."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Rows trained by staleness in optimizer steps."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last step's metrics by name."""
    eta_s: float | None = None
    """Seconds to the last planned step; None while unknown."""
    waiting_for: str = ""
    """What it waits for, in words; empty when it waits for nothing."""
