"""Prometheus metrics of the current watch (canary, shadow)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from meshrl.rewardd.registry.active_reward import ActiveRewardJudge

VALUES = {
    "rows": "Rows that both versions were asked to score.",
    "equal": "Of those, rows with equal scores.",
    "faults_a": "Of those, rows that the current version gave no score.",
    "faults_b": "Of those, rows that the watched version gave no score.",
    "skipped": "Rows left out because the watched version was too slow.",
    "mean_a": "Mean score of the current version on rows that both scored.",
    "mean_b": "Mean score of the watched version on the same rows.",
}


class WatchMetrics(Collector):
    """Collected on each scrape; no samples while no version is watched."""

    def __init__(self, judge: ActiveRewardJudge) -> None:
        self._judge = judge

    def collect(self) -> Iterator[Metric]:
        """One gauge per value, labelled with both versions."""
        differences = self._judge.differences
        for name, text in VALUES.items():
            gauge = GaugeMetricFamily(f"meshrl_reward_watch_{name}", text, labels=["a", "b"])
            if differences is not None:
                gauge.add_metric([differences.a, differences.b], getattr(differences, name))
            yield gauge
