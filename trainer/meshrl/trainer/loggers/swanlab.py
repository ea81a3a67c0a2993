"""SwanLab (https://docs.swanlab.cn): offline in `<run.dir>/swanlab` unless SWANLAB_MODE says otherwise.

It measures the machine itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import numpy as np

from meshrl.trainer.loggers._types import COLUMNS, LoggedRows, LoggedRun


class SwanlabLogger:
    """One run; online, a trainer that starts again continues in it."""

    def __init__(self, run: LoggedRun) -> None:
        import swanlab

        self._swanlab: Any = swanlab
        mode = os.environ.get("SWANLAB_MODE", "offline")
        directory = run.directory / "swanlab"
        directory.mkdir(parents=True, exist_ok=True)
        online = {"id": run.kept_id("swanlab", uuid4().hex[:21]), "resume": "allow"}
        self._run: Any = swanlab.init(
            project=run.project,
            name=run.name,
            log_dir=str(directory),
            mode=mode,
            config=dict(run.settings),
            **(online if mode == "online" else {}),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        self._run.log(dict(values), step=step)

    def rows(self, step: int, rows: LoggedRows) -> None:
        """Samples, and the quartiles of each column: SwanLab has no histogram."""
        text = self._swanlab.Text
        told = [
            text(json.dumps(dict(zip(COLUMNS, row, strict=True)), ensure_ascii=False, indent=1))
            for row in rows.samples
        ]
        quartiles = {
            f"histogram/{rows.split}/{name}/{share}": float(np.quantile(values, share / 100))
            for name, values in rows.histograms.items()
            for share in (0, 25, 50, 75, 100)
        }
        self._run.log({**quartiles, f"samples/{rows.split}": told}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


open_logger = SwanlabLogger
