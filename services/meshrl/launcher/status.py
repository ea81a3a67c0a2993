"""What is known of a running mesh at this moment: filled by `observer`, drawn by `view`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshrl.contract.types import EngineStats, Ledger, TrainerPhase, TrainerStatus, Waiting
from meshrl.launcher.supervisor import State
from meshrl.trainer.metrics.learning_signs import LearningWarning

STUCK_S = 10.0
"""A trainer that waits for longer counts as stuck: the view then asks why."""


@dataclass(slots=True)
class MeshStatus:
    """One mesh as a person sees it."""

    run: str
    states: Mapping[str, State]
    """Of every process, updated by the supervisor."""
    started: float = field(default_factory=time.monotonic)
    trainer: TrainerStatus | None = None
    steps: int = 0
    """Seen to be made since `up` began."""
    rewards: dict[int, float] = field(default_factory=dict)
    """Mean reward by step."""
    scores: dict[int, float] = field(default_factory=dict)
    """Held-out score by the step at which it was seen to change."""
    ledger: Ledger | None = None
    fleet: dict[str, EngineStats | None] = field(default_factory=dict)
    """By replica; None while it does not answer."""
    waiting: Sequence[Waiting] = ()
    waiting_since: float | None = None
    warnings: Sequence[LearningWarning] = ()
    """Signs that nothing is learned, at the newest step."""

    def see(self, status: TrainerStatus) -> bool:
        """Take a status in; True when it brings another step."""
        fresh = self.trainer is None or status.step != self.trainer.step
        self.steps += self.trainer is not None and status.step > self.trainer.step
        if status.reward_mean is not None and status.step:
            self.rewards[status.step] = status.reward_mean
        if status.held_out_score is not None:
            last = next(reversed(self.scores.values()), None)
            if status.held_out_score != last:
                self.scores[status.step] = status.held_out_score
        if status.phase is not TrainerPhase.WAITING:
            self.waiting_since, self.waiting = None, ()
        elif self.waiting_since is None:
            self.waiting_since = time.monotonic()
        self.trainer = status
        return fresh

    def recall(self, metrics: Path) -> None:
        """Take rewards and scores from the run's own record, which knows the whole run also where it was resumed."""
        try:
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        except (OSError, ValueError):
            # No record, or a last line that was cut short: what was seen is shown.
            return
        for key, seen in (("reward/mean", self.rewards), ("val/score/mean", self.scores)):
            recorded = {
                line["step"]: line[key] for line in lines if isinstance(line.get(key), float)
            }
            if recorded:
                seen.clear()
                seen.update(sorted(recorded.items()))

    @property
    def elapsed_s(self) -> float:
        """Seconds since `up` began."""
        return time.monotonic() - self.started

    @property
    def stuck(self) -> bool:
        """True when the trainer has waited for long."""
        return self.waiting_since is not None and time.monotonic() - self.waiting_since > STUCK_S
