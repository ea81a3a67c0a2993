"""MLflow (https://mlflow.org/docs): files in `<run.dir>/mlflow` unless MLFLOW_TRACKING_URI names a server."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshrl.trainer.loggers._types import COLUMNS, LoggedRows, LoggedRun

LONGEST = 500
"""Characters of a parameter."""


class MlflowLogger:
    """One run; a trainer that starts again continues in it."""

    def __init__(self, run: LoggedRun) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        if "MLFLOW_TRACKING_URI" not in os.environ:
            # It refuses to log to files unless told; a database would need more than mlflow-skinny.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            mlflow.set_tracking_uri((run.directory / "mlflow").absolute().as_uri())
        mlflow.set_experiment(run.project)
        known = run.kept_id("mlflow", "")
        started = mlflow.start_run(
            run_id=known or None, run_name=run.name, log_system_metrics=False
        )
        self._id: str = started.info.run_id
        if not known:
            (run.directory / "mlflow" / "run-id").write_text(self._id)
            settings = {name: str(value)[:LONGEST] for name, value in run.settings.items()}
            mlflow.log_params(settings, run_id=self._id)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._mlflow.log_metrics(finite, step=step, run_id=self._id)

    def rows(self, step: int, rows: LoggedRows) -> None:
        """Log samples and histograms as one JSON file of the step: MLflow has no histogram."""
        counted = {name: np.histogram(values, bins=32) for name, values in rows.histograms.items()}
        told = {
            "samples": [dict(zip(COLUMNS, row, strict=True)) for row in rows.samples],
            "histograms": {
                name: {"counts": counts.tolist(), "edges": edges.tolist()}
                for name, (counts, edges) in counted.items()
            },
        }
        self._mlflow.log_dict(told, f"rows/{rows.split}-{step}.json", run_id=self._id)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


open_logger = MlflowLogger
