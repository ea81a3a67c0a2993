"""A log line per step with the most important metrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from meshrl.trainer.loggers._types import LoggedRun

log = logging.getLogger("meshrl.trainer.metrics.log")


class ConsoleLogger:
    """One log line per step, whatever the run."""

    SHOWN = (
        ("reward/mean", "reward", "{:.3f}"),
        ("val/score/mean", "val score", "{:.3f}"),
        ("actor/loss", "loss", "{:.4f}"),
        ("actor/grad_norm", "grad", "{:.2f}"),
        ("actor/entropy", "entropy", "{:.3f}"),
        ("staleness/mean", "stale", "{:.2f}"),
        ("response/length_mean", "length", "{:.0f}"),
        ("throughput/tokens_per_s", "tok/s", "{:.0f}"),
        ("time/step_s", "step s", "{:.2f}"),
        ("time/waiting_s", "wait s", "{:.2f}"),
    )

    def __init__(self, run: LoggedRun) -> None: ...

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the line."""
        shown = [
            f"{name} {form.format(values[key])}" for key, name, form in self.SHOWN if key in values
        ]
        log.info("step %d  %s", step, "  ".join(shown))

    def close(self) -> None:
        """Do nothing."""


open_logger = ConsoleLogger
