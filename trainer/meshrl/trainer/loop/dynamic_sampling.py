"""Dynamic sampling: which groups of a take are worth a step, and taking others for those that are not.

    take ──▶ judge each group by a metric ──┬─ all equal, or its mean out of bounds ──▶ filter(reason)
      ▲                                     └─ kept ──▶ enough? ──yes──▶ the batch of the step
      └──────────── the rest, under a batch id of its own ◀───no──┘

DAPO (Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 11) drops groups without a gradient; PRIME (Cui et al.
2025, https://arxiv.org/abs/2502.01456) also those that are too hard or too easy. Groups leave whole. A trainer that
dies here has settled nothing: the groups it kept come back, those it filtered stay filtered.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from meshrl.contract.errors import UserError
from meshrl.contract.ports import Queue
from meshrl.contract.rows import column_text
from meshrl.contract.types import Batch, BatchRow, Columns, Json, Uid
from meshrl.trainer.config import FilterGroupsConfig
from meshrl.trainer.learner.experience import is_baseline
from meshrl.trainer.loop.reward_guard import BatchQueue

log = logging.getLogger(__name__)

EQUAL, TOO_LOW, TOO_HIGH, SPARE = "equal_rewards", "too_hard", "too_easy", "oversampled"
"""Reasons in the ledger."""


class DynamicSampling:
    """Puts together the batch of each step in turn; on rank 0."""

    def __init__(
        self,
        queue: Queue,
        batches: BatchQueue,
        run: str,
        config: FilterGroupsConfig,
        *,
        groups: int,
        extra_rows: int,
    ) -> None:
        """For batches of `groups` groups, whose last `extra_rows` rows are greedy baselines.

        `queue` hears which rows leave and which were trained on; `batches` has the scores.
        """
        self._queue = queue
        self._batches = batches
        self._run = run
        self._config = config
        self._groups = groups
        self._extra_rows = extra_rows
        self._at: tuple[int, int] | None = None
        self._parts: list[Batch] = []
        """The kept groups of each take of this step."""
        self._dropped: Counter[str] = Counter()
        self._values: list[float] = []
        """The metric of every row judged for this step."""

    def begin(self, epoch: int, step: int) -> None:
        """Start to collect for a step; a second call for the same step changes nothing."""
        if self._at != (epoch, step):
            self._at = (epoch, step)
            self._parts = []
            self._dropped = Counter()
            self._values = []

    def drop(self, damaged: Iterable[Uid]) -> None:
        """Drop the groups of unreadable rows; another take gives others where none are left."""
        self._parts = [without(part, damaged) for part in self._parts]

    @property
    def batch_id(self) -> str:
        """The id of the next take: its own for each, so that each can be repeated."""
        assert self._at is not None
        refill = f".{len(self._parts)}" if self._parts else ""
        return f"{self._run}/{self._at[0]}.{self._at[1]}{refill}"

    @property
    def wanted(self) -> int:
        """Groups to take next."""
        first = self._config.enable and not self._parts
        missing = self._groups - self._kept
        return math.ceil(missing * self._config.oversample) if first else missing

    @property
    def batch(self) -> Batch:
        """The groups kept so far."""
        assert self._at is not None
        rows = tuple(row for part in self._parts for row in part.rows)
        first = f"{self._run}/{self._at[0]}.{self._at[1]}"
        return Batch.of_rows(rows, batch_id=first, run=self._run, step=self._at[1])

    @property
    def metrics(self) -> dict[str, Json]:
        """Metrics of the last batch; none where nothing is judged."""
        if not self._config.enable:
            return {}
        dropped = {f"sampling/dropped_{reason}": n for reason, n in self._dropped.items()}
        kept_groups = self._kept
        return {
            "sampling/takes": len(self._parts),
            "sampling/groups_kept": kept_groups,
            "sampling/metric_mean": sum(self._values) / max(1, len(self._values)),
            "sampling/kept_share": kept_groups / max(1, kept_groups + sum(self._dropped.values())),
            **dropped,
        }

    async def add(self, taken: Batch) -> bool:
        """Judge the groups of `taken`; True when the step has its batch, or gets no more.

        Raises:
            UserError: not one group was kept in as many takes as are allowed.
        """
        if not self._config.enable:
            self._parts.append(taken)
            return True
        asked = self.wanted
        self._parts.append(await self._judged(taken))
        if 2 * len(taken.groups) <= asked:
            # The data end, or trainers died with these groups: then they are to be trained without others.
            return True
        limit = self._config.max_num_gen_batches
        if self._kept >= self._groups:
            return True
        if not limit or len(self._parts) < limit:
            return False
        if not self._kept:
            raise UserError(
                f"run {self._run}: {limit} takes for step {taken.step + 1} and no group worth a step"
                f" ({dict(self._dropped)}): the prompts are all too easy or too hard, or the reward is constant;"
                " see algorithm.filter_groups"
            )
        log.warning(
            "run %s: step %d is made from %d of %d groups: %d takes are the limit",
            self._run,
            taken.step + 1,
            self._kept,
            self._groups,
            limit,
        )
        return True

    @property
    def batch_ids(self) -> tuple[str, ...]:
        """Ids of the takes in this step's batch, which are settled together."""
        return tuple([part.batch_id for part in self._parts])

    async def settle(self, batch: Batch, epoch: int) -> None:
        """Tell the queue that every part of `batch` is in the weights."""
        for batch_id in self.batch_ids:
            await self._queue.settle(batch.run, epoch=epoch, step=batch.step, batch_id=batch_id)

    @property
    def _kept(self) -> int:
        return sum(len({row.group for row in part.rows}) for part in self._parts)

    async def _judged(self, taken: Batch) -> Batch:
        """The groups of `taken` that are kept; the others have left the queue."""
        columns = await self._batches.fetch_rows(
            self._run, [row.uid for row in taken.rows], ("reward", "reward_components")
        )
        keep: list[BatchRow] = []
        leaving: dict[str, list[BatchRow]] = {}
        room = self._groups - self._kept
        pairs = zip(taken.rows, columns, strict=True)
        for _, members in itertools.groupby(pairs, key=lambda pair: pair[0].group):
            group = list(members)
            rows = [row for row, _ in group]
            reason = self._verdict(group) or (SPARE if room == 0 else "")
            if reason:
                leaving.setdefault(reason, []).extend(rows)
                self._dropped[reason] += 1
            else:
                keep.extend(rows)
                room -= 1
        for reason, rows in leaving.items():
            await self._queue.filter(
                self._run,
                epoch=self._epoch,
                uids=[row.uid for row in rows],
                reason=reason,
            )
        return Batch.of_rows(keep, batch_id=taken.batch_id, run=taken.run, step=taken.step)

    @property
    def _epoch(self) -> int:
        assert self._at is not None
        return self._at[0]

    def _verdict(self, group: Sequence[tuple[BatchRow, Columns]]) -> str:
        """The reason for which the group leaves, or empty."""
        values = [
            self._value(row, columns)
            for row, columns in group
            if not is_baseline(row, self._extra_rows)
        ]
        self._values.extend(values)
        if len(values) > 1 and min(values) == max(values):
            return EQUAL
        mean = sum(values) / len(values) if values else 0.0
        if self._config.low is not None and mean < self._config.low:
            return TOO_LOW
        if self._config.high is not None and mean > self._config.high:
            return TOO_HIGH
        return ""

    def _value(self, row: BatchRow, columns: Columns) -> float:
        name = self._config.metric
        if name == "reward":
            return float(columns["reward"][0])
        said = json.loads(column_text(columns["reward_components"]))
        components = {name: value for name, value in said.items() if not isinstance(value, str)}
        if name not in components:
            known = ", ".join(sorted(components)) or "none"
            raise UserError(
                f"algorithm.filter_groups.metric: row {row.uid} has no reward component {name!r} (it has: {known})"
            )
        return float(components[name])


def without(batch: Batch, damaged: Iterable[Uid]) -> Batch:
    """The batch without the groups of `damaged` rows."""
    tasks = {uid.task for uid in damaged}
    rows = [row for row in batch.rows if row.uid.task not in tasks]
    return Batch.of_rows(rows, batch_id=batch.batch_id, run=batch.run, step=batch.step)
