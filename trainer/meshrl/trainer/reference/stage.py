"""The stage that adds `ref_logprobs` to rows.

queue ─lease(tokens)─▶ SharedPrefixGroups ─whole groups─▶ ReferenceModel: packed forward ─ref_logprobs─▶ queue
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

from meshrl.contract.errors import (
    CorruptError,
    NotFoundError,
    UserError,
)
from meshrl.contract.ports import Queue
from meshrl.contract.rows import column_parts, media_of_row, row_media
from meshrl.contract.stage_worker import Failure, Intake, StageResult, StageStats, StageWorker
from meshrl.contract.types import (
    PARTS,
    REFERENCE_STAGE,
    ROW_MEDIA,
    Columns,
    Int32,
    LeasedRow,
    Outcome,
    RowWrite,
    Uid,
)
from meshrl.trainer.reference.model import Seen

ROWS = 1024
"""Rows held at once: most of them wait for the rest of their group."""
MAX_WAIT_S = 1.0
"""Longest wait for rows of the group: another worker may have them, they may be sampled again, or never come."""
MOST_WAITING = 512
"""Waiting rows; beyond this number the oldest wait no longer."""
MOST_AT_ONCE = 256
"""Rows in one piece of work."""
GROUPS_KNOWN = 4096
"""Groups whose row counts are remembered; the last row of an older group waits without end."""

Work: TypeAlias = Callable[[Sequence[LeasedRow]], Awaitable[Sequence[StageResult]]]


class ReferenceScorer(Protocol):
    """Maps the tokens and images of rows to their columns."""

    async def __call__(
        self, rows: Sequence[Int32], seen: Sequence[Seen], *, temperature: float
    ) -> Sequence[Columns]:
        """One mapping of columns a row."""
        ...


class ReferenceStage:
    """Leases rows that lack a reference's columns and writes them, until drained."""

    def __init__(
        self,
        queue: Queue,
        runs: Sequence[str],
        judged: ReferenceScorer,
        *,
        worker: str,
        together: bool = True,
        pictures: bool = False,
    ) -> None:
        """Prepare; nothing is leased before `run`.

        Args:
            queue: Source of rows.
            runs: Which runs' rows.
            judged: The model that computes the columns.
            pictures: It reads those of rows.
            worker: This stage's name in leases.
            together: Rows wait for the rest of their group, whose prompt is shared (`SharedPrefixGroups`).
        """
        self._queue = queue if pictures else None
        self._judged = judged
        self._loop = StageWorker(
            queue,
            runs,
            REFERENCE_STAGE,
            SharedPrefixGroups(self._handle).results if together else self._handle,
            worker=worker,
            intake=Intake(limit=ROWS, per_call="group" if together else 32),
        )

    @property
    def stats(self) -> StageStats:
        """Rows leased, written, failed and lost since the start."""
        return self._loop.stats

    def drain(self) -> None:
        """Lease no more; `run` returns when the held rows are written."""
        self._loop.drain()

    async def run(self, *, grace_s: float = 30.0) -> None:
        """Work until drained."""
        await self._loop.run(grace_s=grace_s)

    async def _handle(self, rows: Sequence[LeasedRow]) -> Sequence[StageResult]:
        """Batch rows by temperature: the policy's logits are divided by it, so these are too."""
        by_temperature: dict[float, list[LeasedRow]] = defaultdict(list)
        for row in rows:
            by_temperature[row.task.sampling.temperature or 1.0].append(row)
        results: list[StageResult] = []
        for temperature, part in by_temperature.items():
            results.extend(await self._answer(part, temperature))
        return results

    async def _answer(self, rows: Sequence[LeasedRow], temperature: float) -> list[StageResult]:
        try:
            sequences = [_sequences(row) for row in rows]
            seen = await self._seen(rows)
            flat = [tokens for of_row in sequences for tokens in of_row]
            found = iter(await self._judged(flat, seen, temperature=temperature))
            results = [_joined(list(itertools.islice(found, len(of_row)))) for of_row in sequences]
        except (UserError, CorruptError, NotFoundError) as error:  # not found: gone meanwhile
            if len(rows) > 1:  # one row's defect must not fail the others
                return [r for row in rows for r in await self._answer([row], temperature)]
            lasting = not isinstance(error, NotFoundError)
            fault, reason = Outcome.INFRA_FAULT, str(error)
            return [Failure(uid=rows[0].uid, outcome=fault, reason=reason, lasting=lasting)]
        return [
            RowWrite(uid=row.uid, columns=columns)
            for row, columns in zip(rows, results, strict=True)
        ]

    async def _seen(self, rows: Sequence[LeasedRow]) -> list[Seen]:
        """The pictures of rows, with those that an environment answered with."""
        if self._queue is None:
            return []
        found: list[Columns] = []
        for run, part in itertools.groupby([row.uid for row in rows], key=lambda uid: uid.run):
            found += await self._queue.fetch_rows(run, list(part), ("loss_mask", ROW_MEDIA))
        return [
            Seen(columns["loss_mask"], media_of_row(row.uid, row_media(columns), row.task.media))
            for row, columns in zip(rows, found, strict=True)
        ]


def _sequences(row: LeasedRow) -> list[Int32]:
    """The tokens of a row; of one with several branches, those of each, which see nothing of each other.

    Raises CorruptError.
    """
    tokens = row.columns["tokens"]
    if PARTS not in row.columns:
        return [tokens]
    parts = column_parts(row.uid, row.columns[PARTS], len(tokens))
    return np.split(tokens, [part.start for part in parts[1:]])


def _joined(branches: Sequence[Columns]) -> Columns:
    """The columns of a row, of its branches' end to end."""
    return {name: np.concatenate([each[name] for each in branches]) for name in branches[0]}


@dataclass(slots=True, eq=False)
class _WaitingRows:
    """The rows of one caller, of one group."""

    rows: Sequence[LeasedRow]
    due: asyncio.Event = field(default_factory=asyncio.Event)
    results: list[StageResult] | None = None


class SharedPrefixGroups:
    """Brings the rows of a group together for `work`, so that their common prompt is computed once.

    some rows of a group ──▶ wait for the others, at most MAX_WAIT_S ──▶ one piece of work at a time, on all due

    consumes: rows as they were leased. waits for: their siblings, then the work before theirs. unblocked by: the last
    sibling, MOST_WAITING, MAX_WAIT_S; the end of the work. produces: results for each caller's own rows. A group is
    trained whole, so its rows lose nothing by waiting for each other, unless some never come. Belongs to one event
    loop.
    """

    def __init__(
        self, work: Work, *, max_wait_s: float = MAX_WAIT_S, most_waiting: int = MOST_WAITING
    ) -> None:
        self.max_wait_s = max_wait_s
        self._most_waiting = most_waiting
        self._work = work
        self._parts: list[_WaitingRows] = []
        """Rows to work on, in order of arrival."""
        self._received: dict[tuple[str, str], int] = {}
        """Number of rows received of each incomplete group, by run and task."""
        self._one_at_a_time = asyncio.Lock()

    async def results(self, rows: Sequence[LeasedRow]) -> Sequence[StageResult]:
        """The results of `work` for `rows`, all of one group.

        The first due caller works on all that are due. It alone hears of an error; then, or when it is cancelled, the
        next one works.
        """
        part = _WaitingRows(rows)
        self._parts.append(part)
        self._join(part)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.max_wait_s):
                    await part.due.wait()
            part.due.set()
            async with self._one_at_a_time:
                if part.results is None:
                    await self._work_on(self._batch(part))
        finally:
            with suppress(ValueError):
                self._parts.remove(part)
        assert part.results is not None
        return part.results

    def _join(self, part: _WaitingRows) -> None:
        """Add `part`, and end the waits that it completes."""
        first = part.rows[0]
        group = first.uid.run, first.uid.task
        seen = self._received.pop(group, 0) + len(part.rows)
        if seen >= first.task.group_size:
            for other in self._parts:
                if (other.rows[0].uid.run, other.rows[0].uid.task) == group:
                    other.due.set()
        else:
            self._received[group] = seen
            if len(self._received) > GROUPS_KNOWN:
                del self._received[next(iter(self._received))]
        waiting = [each for each in self._parts if not each.due.is_set()]
        if sum(len(each.rows) for each in waiting) > self._most_waiting:
            waiting[0].due.set()

    def _batch(self, own: _WaitingRows) -> list[_WaitingRows]:
        """Waiting rows that are due, `own` first."""
        batch, count = [own], len(own.rows)
        for part in self._parts:
            if part is not own and part.due.is_set() and count + len(part.rows) <= MOST_AT_ONCE:
                batch.append(part)
                count += len(part.rows)
        return batch

    async def _work_on(self, batch: Sequence[_WaitingRows]) -> None:
        results = await self._work([row for part in batch for row in part.rows])
        result_of: dict[Uid, StageResult] = {result.uid: result for result in results}
        for part in batch:
            part.results = [result_of[row.uid] for row in part.rows]
            with suppress(ValueError):  # whose caller has been cancelled meanwhile
                self._parts.remove(part)
