"""Prometheus metrics of the trainer: the newest step, its metrics, when it was made."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from meshrl.contract.types import TrainerPhase, TrainerStatus

TIME = "time/unix_s"
MANY = re.compile(r"mismatch/(version|replica)_")
"""Metrics whose names change from step to step: a series for each would never end."""


class TrainerCollector(Collector):
    """Reads the trainer's status at each scrape, in the thread of the metrics' HTTP server."""

    def __init__(self, run: str, look: Callable[[], TrainerStatus]) -> None:
        self._run = run
        self._look = look

    def describe(self) -> list[Metric]:
        """No metric is known before the first step."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Read all metrics."""
        status, labels = self._look(), [self._run]
        step = GaugeMetricFamily("meshrl_trainer_step", "Optimizer steps done.", labels=["run"])
        step.add_metric(labels, status.step)
        phase = GaugeMetricFamily(
            "meshrl_trainer_phase", "1 for what it does now.", labels=["run", "phase"]
        )
        for each in TrainerPhase:
            phase.add_metric([*labels, each.value], float(each is status.phase))
        yield from (step, phase)
        if TIME in status.metrics:
            made = GaugeMetricFamily(
                "meshrl_trainer_step_made_seconds",
                "When the newest step ended, in seconds since 1970.",
                labels=["run"],
            )
            made.add_metric(labels, status.metrics[TIME])
            yield made
        training = GaugeMetricFamily(
            "meshrl_training",
            "Metrics of the newest step, as in metrics.jsonl.",
            labels=["run", "metric"],
        )
        for name, value in status.metrics.items():
            if name != TIME and not MANY.match(name):
                training.add_metric([*labels, name], value)
        if status.held_out_score is not None:
            training.add_metric([*labels, "val/score/mean"], status.held_out_score)
        yield training
