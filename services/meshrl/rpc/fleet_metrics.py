"""What an autoscaler asks of the queue: how much there is to sample, and how many workers that is work for."""

from __future__ import annotations

import math

from prometheus_client.core import GaugeMetricFamily

from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.operations import admission


class FleetFamilies:
    """The gauges of the sampling stage, by run."""

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
            *(self._ready, self._held, self._slots, self._workers, self._headroom, self._wanted),
        )

    def add(self, run: Run) -> None:
        """The numbers of one run. Reads single numbers only: it is called in another thread."""
        stage = next(stage for stage in run.stages if stage.first)
        heard = run.fair_share.heard_of(now=run.clock(), silence_s=run.spec.lease_ttl_s)
        ready, held = len(run.ready[stage.number]), sum(holder.rows for holder in heard)
        slots = sum(holder.slots for holder in heard)
        room = 0 if run.feed_closed else admission.free_groups(run) * run.spec.group_size
        for family, value in (
            (self._ready, ready),
            (self._held, held),
            (self._slots, slots),
            (self._workers, len(heard)),
            (self._headroom, room),
            (self._wanted, wanted(ready + held, slots, len(heard))),
        ):
            family.add_metric([run.name], value)


def wanted(rows: int, slots: int, workers: int) -> int:
    """Workers that `rows` rows would fill, if each has as many slots as those that are there; 1 where none is there.

    The rows that may wait are bounded by staleness, so this is bounded too; it falls when the trainer is what is
    waited for, since then what was admitted is sampled already.
    """
    if not rows:
        return 0
    return math.ceil(rows * workers / slots) if slots else 1


def _gauge(name: str, help_: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"meshrl_rollout_{name}", help_, labels=["run"])
