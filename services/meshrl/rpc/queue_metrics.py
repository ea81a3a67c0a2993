"""Prometheus metrics of the queue: rows, durations, bytes, and the wanted number of rollout workers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

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
        fleet = [
            GaugeMetricFamily(f"meshrl_rollout_{name}", told, labels=["run"])
            for name, told in FLEET.items()
        ]
        for run in self._queue.open_runs:
            for gauge, value in zip(fleet, _of_fleet(run), strict=True):
                gauge.add_metric([run.name], value)
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
        yield from (expired, ready, commits, *fleet)
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


FLEET: Final = {
    "ready_rows": "Rows that a rollout worker could lease now.",
    "held_rows": "Rows that rollout workers hold.",
    "slots": "Rows that the workers heard of lately could hold.",
    "workers": "Rollout workers heard of lately.",
    "headroom_rows": "Rows that may still come in before staleness or bytes bound it.",
    "wanted_workers": "As many as the rows that wait or run would fill; a hint.",
}
"""Gauges of the rollout stage, by run, which an autoscaler reads."""


def _of_fleet(run: Run) -> tuple[int, ...]:
    """The values of FLEET. Reads only single numbers, because another thread calls it."""
    stage = next(stage for stage in run.stages.ordered if stage.first)
    workers = run.fair_share.recent_workers(now=run.clock(), silence_s=run.spec.lease_ttl_s)
    ready, held = run.num_ready(stage), sum(holder.rows for holder in workers)
    slots = sum(holder.slots for holder in workers)
    headroom = 0 if run.record.feed_closed else run.free_groups() * run.spec.group_size
    wanted = wanted_workers(ready + held, slots, len(workers))
    return ready, held, slots, len(workers), headroom, wanted


def wanted_workers(rows: int, slots: int, workers: int) -> int:
    """The number of workers that `rows` rows would fill, with the present slots per worker; 1 if there is no worker.

    Staleness bounds the waiting rows, so it bounds this too. The number falls when the trainer is the bottleneck,
    because then the admitted rows are sampled already.
    """
    if not rows:
        return 0
    return math.ceil(rows * workers / slots) if slots else 1
