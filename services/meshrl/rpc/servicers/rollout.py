"""Serves what an engine says of itself over gRPC. meshrl/v1/rollout.proto describes each method."""
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from meshrl.contract.types import EngineStats
from meshrl.rpc.servicers.base import TableServicer
from meshrl.rpc.tables.services import RolloutTable


class Telling(Protocol):
    """The part of an Engine that callers may use. Its rows come from the queue, its weights from the weight plane."""

    def stats(self) -> EngineStats: ...


class RolloutServicer(TableServicer, table=RolloutTable):
    """What an engine says of itself."""

    def __init__(self, engine: Telling) -> None:
        super().__init__(engine)


class EngineCollector(Collector):
    """Prometheus metrics of how an engine takes new weights, read at each scrape."""

    def __init__(self, engine: Telling) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Two gauges."""
        stats = self._engine.stats()
        yield GaugeMetricFamily(
            "meshrl_engine_update_pause_seconds",
            "How long the last update of the weights held generation up.",
            value=stats.update_pause_s,
        )
        staging = GaugeMetricFamily(
            "meshrl_engine_weights_staging",
            "1 for where the last version of the weights waited for its commit.",
            labels=["staging"],
        )
        for where in ("device", "host"):
            staging.add_metric([where], float(stats.staging == where))
        yield staging
