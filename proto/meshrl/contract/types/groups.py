"""Rows by the group, for bulk writers and readers of the queue: a few objects for eight rows.

    GroupRows      the names of some rows of one group
    PackedGroup    columns for some rows of one group, packed once by the writer
    PayloadGroup   columns of some rows of one group, as the queue handed them out: frames as they were written
    LeasedGroup    the same with the task and the fencing token

The row-level methods of the port (`write`, `fetch`, `Lease.rows`) take these apart: see contract/rows.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from meshrl.contract.errors import CorruptError, UserError
from meshrl.contract.frames import (
    FRAME_BYTES,
    Array,
    Flat,
    Frame,
    pack,
    signature,
    strip_checksum,
)
from meshrl.contract.types.rows import (
    LeasedRow,
    Outcome,
    PackedTask,
    RowFacts,
    RowWrite,
    Uid,
    Version,
)


@dataclass(frozen=True, kw_only=True)
class GroupRows:
    """Names some rows of one group."""

    task: str
    """Task id."""
    indices: tuple[int, ...]
    attempts: tuple[int, ...]

    def uids(self, run: str) -> list[Uid]:
        """The rows' names, in order."""
        pairs = zip(self.indices, self.attempts, strict=True)
        return [Uid(run, self.task, index, attempt) for index, attempt in pairs]

    def __len__(self) -> int:
        return len(self.indices)


def group_rows(run: str, uids: Iterable[Uid]) -> list[GroupRows]:
    """Rows by their groups; rows that stand next to each other stay together, in order.

    Raises:
        UserError: a row of another run, with `uid`.
    """
    found: list[tuple[str, list[int], list[int]]] = []
    for uid in uids:
        if uid.run != run:
            raise UserError(f"row {uid} is not of run {run}", uid=uid)
        if not found or found[-1][0] != uid.task:
            found.append((uid.task, [], []))
        found[-1][1].append(uid.index)
        found[-1][2].append(uid.attempt)
    return [
        GroupRows(task=task, indices=tuple(indices), attempts=tuple(attempts))
        for task, indices, attempts in found
    ]


@dataclass(frozen=True, kw_only=True)
class PackedGroup(GroupRows):
    """Columns of one stage for rows of one group that are held under one token."""

    token: int
    """The fencing token of the lease."""
    frame: bytes
    """A frame (contract/frames.py) with the rows in the order of `indices`."""
    facts: tuple[RowFacts, ...] = ()
    """One per row from the stage that samples; none from others."""


@dataclass(frozen=True, kw_only=True)
class ProgressGroup(PackedGroup):
    """Progress of rows that a stage has not written yet: entries to append to each."""

    starts: tuple[int, ...]
    """Per row: entries that were appended before, so that a repeated append counts once."""


Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
LOGPROBS: Final = ("rollout_logprobs", "ref_logprobs", "ref_top_logprobs")
"""The columns that may be rounded, so that they hold 16-bit values and compress to half the bytes."""


def rounded(logprobs: npt.NDArray[np.float32], precision: Precision) -> npt.NDArray[np.float32]:
    """float32[R] of the same shape, rounded to what 16 bits hold (ties to even).

    The error is at most 2^-9 of the value in bf16 and 2^-11 in fp16: for log-probs above -16 below 0.031 and 0.0078.
    """
    if precision == "fp32":
        return logprobs
    if precision == "fp16":
        # Beyond the range of fp16 only -inf and what no sampler draws.
        return logprobs.clip(-65504, 65504).astype(np.float16).astype(np.float32)
    bits = logprobs.view(np.uint32)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(logprobs), even.view(np.float32), logprobs)


def packed_groups(
    token_of: Mapping[Uid, int], rows: Sequence[RowWrite], precision: Precision = "fp32"
) -> list[PackedGroup]:
    """Row-level writes by group, token and signature, packed; of two writes to one row the last counts.

    Log-probs are rounded to `precision`.

    Raises:
        UserError: with `uid`; no token for a row, or an array that no frame can hold.
    """
    frames: list[list[RowWrite]] = []
    filling: dict[Any, tuple[list[RowWrite], int]] = {}
    """By what rows of a frame have in common: the frame that is being filled, and its bytes."""
    for row in {row.uid: row for row in rows}.values():
        if precision != "fp32":
            row = _rounded(row, precision)
        uid = row.uid
        if uid not in token_of:
            raise UserError(f"row {uid}: no lease token was given", uid=uid)
        try:
            kind = signature(row.columns)
        except UserError as error:
            raise UserError(f"row {uid}: {error.message}", uid=uid) from error
        key = (uid.task, token_of[uid], row.facts is None, kind)
        size = sum(array.nbytes for array in row.columns.values())
        frame, filled = filling.get(key, ([], 0))
        if not frame or filled + size > FRAME_BYTES:
            frame, filled = [], 0
            frames.append(frame)
        frame.append(row)
        filling[key] = (frame, filled + size)
    return [
        PackedGroup(
            task=rows[0].uid.task,
            indices=tuple(row.uid.index for row in rows),
            attempts=tuple(row.uid.attempt for row in rows),
            token=token_of[rows[0].uid],
            frame=pack([row.columns for row in rows]),
            facts=tuple(row.facts for row in rows if row.facts is not None),
        )
        for rows in frames
    ]


def _rounded(row: RowWrite, precision: Precision) -> RowWrite:
    found = {
        name: rounded(row.columns[name], precision) for name in LOGPROBS if name in row.columns
    }
    return replace(row, columns={**row.columns, **found})


@dataclass(frozen=True, kw_only=True)
class Part:
    """A frame and its place in a group: its row i is row `rows[i]` of the group."""

    rows: tuple[int, ...]
    frame: bytes

    @cached_property
    def head(self) -> Frame:
        """The frame; its bytes are not checked yet. Raises CorruptError."""
        return Frame(self.frame, checked=True)

    @cached_property
    def read(self) -> Frame:
        """The same, checked once. Raises CorruptError."""
        strip_checksum(self.frame, "frame")
        return self.head


@dataclass(frozen=True, kw_only=True)
class PayloadGroup(GroupRows):
    """Columns of rows of one group, in the frames in which they were written."""

    parts: tuple[Part, ...] = ()

    def columns(self) -> list[dict[str, Array]]:
        """Of each row, read-only, in order. Raises CorruptError."""
        found: list[dict[str, Array]] = [{} for _ in self.indices]
        for part in self.parts:
            for name in part.read.columns:
                for row, array in zip(part.rows, part.read.split(name), strict=True):
                    found[row][name] = array
        return found

    def column(self, name: str) -> list[Array]:
        """One column of each row, in order, without copying. Raises CorruptError where a row lacks it."""
        found: list[Array | None] = [None] * len(self.indices)
        for part in self.parts:
            if name in part.read.columns:
                for row, array in zip(part.rows, part.read.split(name), strict=True):
                    found[row] = array
        every = [array for array in found if array is not None]
        if len(every) != len(found):
            raise CorruptError(f"task {self.task}: not every row has column {name}")
        return every


def gathered(groups: Sequence[PayloadGroup], names: Sequence[str]) -> dict[str, Flat]:
    """Columns of all rows of one group or more, each concatenated: a single copy, into one new array.

    Raises:
        CorruptError: a row lacks one, or has entries of another shape.
    """
    pieces = {name: [_pieces(group, name) for group in groups] for name in names}
    found: dict[str, Flat] = {}
    for name, of_groups in pieces.items():
        lengths = np.array([length for _, own in of_groups for length in own], np.uint32)
        arrays = [array for values, _ in of_groups for array in values]
        tail, *others = {array.shape[1:] for array in arrays}
        if others:  # of rows without an entry, nothing else bounds it
            raise CorruptError(f"column {name} has entries of different shapes")
        dtype = np.result_type(*{array.dtype for array in arrays})
        found[name] = Flat(np.empty((int(lengths.sum()), *tail), dtype), lengths)
    starts = dict.fromkeys(names, 0)
    # Group by group: what has just been checked is copied from the processor's cache.
    for number, group in enumerate(groups):
        for part in group.parts:
            if not part.head.columns.keys().isdisjoint(names):
                part.read  # noqa: B018
        for name, flat in found.items():
            values, own = pieces[name][number]
            start = starts[name]
            starts[name] += sum(own)
            np.concatenate(values, out=flat.values[start : starts[name]])
    return found


def _pieces(group: PayloadGroup, name: str) -> tuple[list[Array], Sequence[int]]:
    """One column of all rows on end, in as few arrays as it lies in, and the entries of each row."""
    every = tuple(range(len(group)))
    for part in group.parts:
        column = part.head.columns.get(name)
        if column is not None and part.rows == every:
            return [column.values], column.lengths or (1,) * len(group)
    rows = [np.atleast_1d(row) for row in group.column(name)]
    return rows, [len(row) for row in rows]


@dataclass(frozen=True, kw_only=True)
class LeasedGroup(PayloadGroup):
    """Rows of one group that were handed to a stage, with the columns that it reads."""

    token: int
    """Fencing token: grows with every grant; a write under an older one is refused."""
    deliveries: tuple[int, ...]
    """Per row: 1 on the first delivery to this stage, one more on each redelivery."""
    packed: PackedTask
    progress: tuple[Part, ...] = ()
    """What earlier holders of this stage appended, in order."""

    def rows(self) -> list[LeasedRow]:
        """Taken apart. Raises CorruptError."""
        task = self.packed.task
        pieces: list[dict[str, list[Array]]] = [{} for _ in self.indices]
        for part in self.progress:
            for name in part.read.columns:
                for row, array in zip(part.rows, part.read.split(name), strict=True):
                    pieces[row].setdefault(name, []).append(array)
        every = zip(self.uids(task.run), self.columns(), self.deliveries, pieces, strict=True)
        return [
            LeasedRow(
                uid=uid,
                token=self.token,
                task=task,
                columns=columns,
                delivery=delivery,
                prefix={name: np.concatenate(found) for name, found in appended.items()},
            )
            for uid, columns, delivery, appended in every
        ]


@dataclass(frozen=True, kw_only=True)
class BatchGroup(GroupRows):
    """One group of a batch's manifest; tuples have an entry per row."""

    size: int
    """The true size of the group: what the estimator divides by, also when fewer rows were kept."""
    num_tokens: tuple[int, ...]
    oldest: tuple[Version, ...]
    newest: tuple[Version, ...]
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """One row of a batch's manifest."""

    uid: Uid
    group: str
    """Task id: rows of one group share it and stand next to each other."""
    group_size: int
    """As in BatchGroup."""
    num_tokens: int
    oldest: Version
    newest: Version
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Complete groups taken for optimizer step `step`. Payload is fetched apart, by each rank its own rows."""

    batch_id: str
    run: str
    step: int
    groups: tuple[BatchGroup, ...]

    @cached_property
    def rows(self) -> tuple[BatchRow, ...]:
        """The rows of all groups, in order."""
        return tuple(
            [
                BatchRow(
                    uid=uid,
                    group=group.task,
                    group_size=group.size,
                    num_tokens=num_tokens,
                    oldest=oldest,
                    newest=newest,
                    outcome=outcome,
                )
                for group in self.groups
                for uid, num_tokens, oldest, newest, outcome in zip(
                    group.uids(self.run),
                    group.num_tokens,
                    group.oldest,
                    group.newest,
                    group.outcomes,
                    strict=True,
                )
            ]
        )

    @classmethod
    def of_rows(cls, rows: Sequence[BatchRow], *, batch_id: str, run: str, step: int) -> Batch:
        """From rows; those of one group stand next to each other."""
        return cls(
            batch_id=batch_id,
            run=run,
            step=step,
            groups=tuple(
                _batch_group(list(members)) for _, members in groupby(rows, lambda row: row.group)
            ),
        )


def _batch_group(rows: Sequence[BatchRow]) -> BatchGroup:
    return BatchGroup(
        task=rows[0].group,
        indices=tuple(row.uid.index for row in rows),
        attempts=tuple(row.uid.attempt for row in rows),
        size=rows[0].group_size,
        num_tokens=tuple(row.num_tokens for row in rows),
        oldest=tuple(row.oldest for row in rows),
        newest=tuple(row.newest for row in rows),
        outcomes=tuple(row.outcome for row in rows),
    )


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Rows granted to one worker for one stage until `ttl_s` after the grant or the last renewal."""

    stage: str
    worker: str
    ttl_s: float
    groups: tuple[LeasedGroup, ...]

    @property
    def run(self) -> str:
        """The run of all its rows; empty where it has none."""
        return self.groups[0].packed.task.run if self.groups else ""

    @property
    def num_rows(self) -> int:
        """Rows of all groups, counted without reading them."""
        return sum(map(len, self.groups))

    def token_of(self) -> dict[Uid, int]:
        """The fencing token of each row."""
        return {uid: group.token for group in self.groups for uid in group.uids(self.run)}

    @cached_property
    def rows(self) -> tuple[LeasedRow, ...]:
        """The rows of all groups, in order. Raises CorruptError."""
        return tuple(row for group in self.groups for row in group.rows())
