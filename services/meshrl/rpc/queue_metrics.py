"""What Prometheus sees of the queue itself: rows, durations, bytes. Read when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from meshrl.rpc.fleet_metrics import FleetFamilies
from meshrl.transferqueue.model.durations import Durations
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import Store


class QueueCollector(Collector):
    """Asks the queue. It is called in the thread of the metrics' HTTP server, and reads single numbers only."""

    def __init__(self, queue: TransferQueue, store: Store) -> None:
        self._queue = queue
        self._store = store

    def describe(self) -> list[Metric]:
        """Nothing is known before the first run is open."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The families."""
        resident = GaugeMetricFamily(
            "meshrl_queue_rows", "Resident rows by state.", labels=["run", "state"]
        )
        admitted = CounterMetricFamily(
            "meshrl_queue_admitted", "Rows that were admitted.", labels=["run"]
        )
        left = CounterMetricFamily("meshrl_queue_left", "Rows that left.", labels=["run", "exit"])
        payload = GaugeMetricFamily(
            "meshrl_queue_open_bytes", "Payload of rows that hold admission credit.", labels=["run"]
        )
        expired = CounterMetricFamily(
            "meshrl_queue_lease_expiries", "Rows whose holder fell silent.", labels=["run", "stage"]
        )
        ready = HistogramMetricFamily(
            "meshrl_queue_ready_to_taken_seconds",
            "Per row, from the last column of its group to the batch that takes it.",
            labels=["run"],
        )
        fleet = FleetFamilies()
        for run in self._queue.open_runs:
            fleet.add(run)
            ledger = run.ledger.snapshot(run.name)
            for state, count in ledger.resident.items():
                resident.add_metric([ledger.run, state], count)
            admitted.add_metric([ledger.run], ledger.admitted)
            for exit_, count in (
                ("trained", ledger.trained),
                ("filtered", sum(ledger.filtered.values())),
                ("stale", sum(ledger.stale.values())),
                ("dead_lettered", sum(ledger.dead_lettered.values())),
            ):
                left.add_metric([ledger.run, exit_], count)
            payload.add_metric([ledger.run], run.open_bytes)
            for stage in run.stages:
                expired.add_metric([ledger.run, stage.name], run.lease_expiries[stage.name])
            _add(ready, [ledger.run], run.ready_to_taken)
        commits = HistogramMetricFamily(
            "meshrl_queue_commit_seconds", "From the start of a commit to its acknowledgement."
        )
        _add(commits, [], self._queue.commit_s)
        yield from (resident, admitted, left, payload, expired, ready, commits, *fleet.families)
        yield GaugeMetricFamily(
            "meshrl_queue_store_bytes",
            "What the store takes on disk or in memory.",
            value=self._store.size_bytes(),
        )


def _add(family: HistogramMetricFamily, labels: list[str], found: Durations) -> None:
    buckets = [
        ("+Inf" if bound == float("inf") else str(bound), count)
        for bound, count in found.cumulative()
    ]
    family.add_metric(labels, buckets, sum_value=found.total_s)
