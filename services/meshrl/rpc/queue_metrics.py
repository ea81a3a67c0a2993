"""Prometheus metrics of the queue: rows, durations, bytes, and the wanted number of rollout workers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import Durations, Store


class QueueCollector(Collector):
    """Reads the queue at each scrape, in the thread of the metrics' HTTP server. So it reads only single numbers."""

    def __init__(self, queue: TransferQueue, store: Store) -> None:
        self._queue = queue
        self._store = store

    def describe(self) -> list[Metric]:
        """No metric is known before the first run is open."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Read all metrics."""
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
        letters = GaugeMetricFamily(
            "meshrl_queue_dead_letters", "Dead letters that are kept.", labels=["run"]
        )
        dropped = CounterMetricFamily(
            "meshrl_queue_dead_letters_dropped",
            "Dead letters that were dropped because the run had too many.",
            labels=["run"],
        )
        ready = HistogramMetricFamily(
            "meshrl_queue_ready_to_taken_seconds",
            "Per row, from the last column of its group to the batch that takes it.",
            labels=["run"],
        )
        fleet = _FleetGauges()
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
            letters.add_metric([ledger.run], len(run.dead_letters))
            dropped.add_metric([ledger.run], run.record.dropped_letters)
            for stage in run.stages.ordered:
                expired.add_metric([ledger.run, stage.name], run.lease_expiries[stage.name])
            _add(ready, [ledger.run], run.ready_to_taken)
        commits = HistogramMetricFamily(
            "meshrl_queue_commit_seconds", "From the start of a commit to its acknowledgement."
        )
        _add(commits, [], self._queue.commit_s)
        yield from (resident, admitted, left, payload, letters, dropped)
        yield from (expired, ready, commits, *fleet.families)
        yield GaugeMetricFamily(
            "meshrl_queue_store_bytes",
            "What the store takes on disk or in memory.",
            value=self._store.size_bytes(),
        )


def _add(family: HistogramMetricFamily, labels: list[str], durations: Durations) -> None:
    buckets = [
        ("+Inf" if bound == float("inf") else str(bound), count)
        for bound, count in durations.cumulative()
    ]
    family.add_metric(labels, buckets, sum_value=durations.total_s)


class _FleetGauges:
    """The gauges of the rollout stage, by run. An autoscaler reads them."""

    def __init__(self) -> None:
        self._ready = _gauge("ready_rows", "Rows that a rollout worker could lease now.")
        self._held = _gauge("held_rows", "Rows that rollout workers hold.")
        self._slots = _gauge("slots", "Rows that the workers heard of lately could hold.")
        self._workers = _gauge("workers", "Rollout workers heard of lately.")
        self._headroom = _gauge(
            "headroom_rows", "Rows that may still come in before staleness or bytes bound it."
        )
        self._wanted = _gauge(
            "wanted_workers", "As many as the rows that wait or run would fill; a hint."
        )
        self.families = (
            self._ready,
            self._held,
            self._slots,
            self._workers,
            self._headroom,
            self._wanted,
        )

    def add(self, run: Run) -> None:
        """Add the numbers of one run. Reads only single numbers, because another thread calls it."""
        stage = next(stage for stage in run.stages.ordered if stage.first)
        workers = run.fair_share.recent_workers(now=run.clock(), silence_s=run.spec.lease_ttl_s)
        ready, held = run.num_ready(stage), sum(holder.rows for holder in workers)
        slots = sum(holder.slots for holder in workers)
        headroom = 0 if run.record.feed_closed else run.free_groups() * run.spec.group_size
        for family, value in (
            (self._ready, ready),
            (self._held, held),
            (self._slots, slots),
            (self._workers, len(workers)),
            (self._headroom, headroom),
            (self._wanted, wanted_workers(ready + held, slots, len(workers))),
        ):
            family.add_metric([run.name], value)


def wanted_workers(rows: int, slots: int, workers: int) -> int:
    """The number of workers that `rows` rows would fill, with the present slots per worker; 1 if there is no worker.

    Staleness bounds the waiting rows, so it bounds this too. The number falls when the trainer is the bottleneck,
    because then the admitted rows are sampled already.
    """
    if not rows:
        return 0
    return math.ceil(rows * workers / slots) if slots else 1


def _gauge(name: str, help_: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"meshrl_rollout_{name}", help_, labels=["run"])
