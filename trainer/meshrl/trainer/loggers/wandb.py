"""Weights & Biases (https://docs.wandb.ai): offline unless WANDB_MODE says otherwise; `wandb sync` uploads it.

wandb itself adds metrics of the system.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from meshrl.trainer.loggers._types import COLUMNS, LoggedRows, LoggedRun

STEP = "training_step"
"""The axis: an evaluation that ended late, and steps that are made again, keep their own."""


class WandbLogger:
    """One run; a trainer that starts again continues in it."""

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        self._wandb: Any = wandb
        mode = os.environ.get("WANDB_MODE", "offline")
        self._run: Any = self._wandb.init(
            project=run.project,
            name=run.name,
            dir=str(run.directory),
            mode=mode,
            id=run.kept_id("wandb", uuid4().hex[:8]),
            # An offline run with the id of another is joined to it by `wandb sync --append`.
            resume="allow" if mode == "online" else None,
            config=dict(run.settings),
        )
        self._run.define_metric("*", step_metric=STEP)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One history row."""
        self._run.log({**values, STEP: step})

    def rows(self, step: int, rows: LoggedRows) -> None:
        """Log a table of samples, and a histogram of each column."""
        wandb = self._wandb
        made = {
            f"histogram/{rows.split}/{name}": wandb.Histogram(values)
            for name, values in rows.histograms.items()
        }
        table = wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows.samples])
        self._run.log({**made, f"samples/{rows.split}": table, STEP: step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


open_logger = WandbLogger
