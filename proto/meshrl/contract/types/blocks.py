"""Rows by the block: some rows of one group, their columns in a few frames, the token under which they are held.

    RowBlock      what every call of the queue about several rows takes or gives
    LeasedBlock   one that was handed to a stage, with its task
    Lease, Batch  hold blocks; their `rows` are the same taken apart, for those who want rows

`pack_rows` is the one way from rows to blocks, `RowBlock.columns` and `LeasedBlock.rows` are the ways back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from meshrl.contract.errors import CorruptError, UserError
from meshrl.contract.frames import FRAME_BYTES, Array, Flat, Frame, pack, signature
from meshrl.contract.types.rows import (
    LeasedRow,
    Outcome,
    PackedTask,
    RowFacts,
    RowWrite,
    Uid,
    Version,
)

Value = TypeVar("Value")


@dataclass(slots=True, kw_only=True)
class RowBlock:
    """Some rows of one group. What a call has no use for is empty in its blocks; tuples have an entry per row.

    Nobody changes one. It is not frozen, since a frozen one takes three times as long to make, and a call makes one
    of each group.
    """

    task: str
    """Task id."""
    indices: tuple[int, ...]
    attempts: tuple[int, ...]
    token: int = 0
    """Fencing token of their lease: grows with every grant; a write under an older one is refused."""
    frames: tuple[Frame, ...] = ()
    """Their columns: a writer packs all into one frame, a reader gets the frames as they were written."""
    facts: tuple[RowFacts, ...] = ()
    """Facts of the rows, in writes of the sampling stage and in batches."""
    starts: tuple[int, ...] = ()
    """In writes of progress, entries of each row appended before, so that a repeated append counts once."""
    group_size: int = 0
    """In a batch, the true size of the group: what the estimator divides by, also when fewer rows were kept."""

    def uids(self, run: str) -> list[Uid]:
        """The rows' names, in order."""
        pairs = zip(self.indices, self.attempts, strict=True)
        return [Uid(run, self.task, index, attempt) for index, attempt in pairs]

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def frame(self) -> Frame:
        """The frame of rows to write or append. Raises UserError for none and for several."""
        if len(self.frames) != 1:
            raise UserError(f"task {self.task}: a write has one frame, not {len(self.frames)}")
        return self.frames[0]

    def part(self, positions: Sequence[int]) -> RowBlock:
        """Some rows of a block that is written or appended, in the order of `positions`."""
        frame = self.frame

        def of(values: tuple[Value, ...]) -> tuple[Value, ...]:
            return tuple([values[at] for at in positions]) if values else ()

        return RowBlock(
            task=self.task,
            indices=of(self.indices),
            attempts=of(self.attempts),
            token=self.token,
            frames=(Frame(frame.select(frame.columns, positions)),),
            facts=of(self.facts),
            starts=of(self.starts),
        )

    def columns(self) -> list[dict[str, Array]]:
        """The columns of each row, read-only. Raises CorruptError."""
        found: list[dict[str, Array]] = [{} for _ in self.indices]
        for frame in self.frames:
            for name in frame.columns:
                for place, array in zip(self.places(frame), frame.split(name), strict=True):
                    found[place][name] = array
        return found

    def column(self, name: str) -> list[Array]:
        """One column of each row, without copying. Raises CorruptError where a row lacks it."""
        found: list[Array | None] = [None] * len(self.indices)
        for frame in self.frames:
            if name in frame.columns:
                for place, array in zip(self.places(frame), frame.split(name), strict=True):
                    found[place] = array
        every = [array for array in found if array is not None]
        if len(every) != len(found):
            raise CorruptError(f"task {self.task}: not every row has column {name}")
        return every

    def pieces(self, name: str) -> tuple[list[Array], Sequence[int]]:
        """One column of all rows on end, in as few arrays as it lies in, and the entries of each row.

        A whole frame is not compared with its checksum. Raises CorruptError.
        """
        every = tuple(range(len(self)))
        for frame in self.frames:
            column = frame.head.get(name)
            if column is not None and self.places(frame) == every:
                return [column.values], column.lengths or (1,) * len(self)
        rows = [np.atleast_1d(row) for row in self.column(name)]
        return rows, [len(row) for row in rows]

    def places(self, frame: Frame) -> tuple[int, ...]:
        """The places in this block of a frame's rows, in the frame's order."""
        return tuple(range(len(self))) if frame.places is None else frame.places


def blocks_of(run: str, uids: Iterable[Uid]) -> list[RowBlock]:
    """Blocks that name `uids`; adjacent rows of a group stay together, in order.

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
        RowBlock(task=task, indices=tuple(indices), attempts=tuple(attempts))
        for task, indices, attempts in found
    ]


def pack_rows(token_of: Mapping[Uid, int], rows: Sequence[RowWrite]) -> list[RowBlock]:
    """Blocks of what is written to rows, by group, token and signature; of two writes to one row the last counts.

    Raises:
        UserError: with `uid`; no token for a row, or an array that no frame can hold.
    """
    frames: list[list[RowWrite]] = []
    filling: dict[Any, tuple[list[RowWrite], int]] = {}
    """The frame that is being filled, and its bytes, by the signature that its rows share."""
    for row in {row.uid: row for row in rows}.values():
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
        RowBlock(
            task=rows[0].uid.task,
            indices=tuple(row.uid.index for row in rows),
            attempts=tuple(row.uid.attempt for row in rows),
            token=token_of[rows[0].uid],
            frames=(Frame(pack([row.columns for row in rows])),),
            facts=tuple(row.facts for row in rows if row.facts is not None),
        )
        for rows in frames
    ]


def gathered(blocks: Sequence[RowBlock], names: Sequence[str]) -> dict[str, Flat]:
    """Columns of all rows of one block or more, each concatenated: a single copy, into one new array.

    Raises:
        CorruptError: a row lacks one, or has entries of another shape.
    """
    pieces = {name: [block.pieces(name) for block in blocks] for name in names}
    found: dict[str, Flat] = {}
    for name, of_blocks in pieces.items():
        lengths = np.array([length for _, own in of_blocks for length in own], np.uint32)
        arrays = [array for values, _ in of_blocks for array in values]
        tail, *others = {array.shape[1:] for array in arrays}
        if others:  # of rows without an entry, nothing else bounds it
            raise CorruptError(f"column {name} has entries of different shapes")
        dtype = np.result_type(*{array.dtype for array in arrays})
        found[name] = Flat(np.empty((int(lengths.sum()), *tail), dtype), lengths)
    starts = dict.fromkeys(names, 0)
    # Block by block: what has just been checked is copied from the processor's cache.
    for number, block in enumerate(blocks):
        for frame in block.frames:
            if not frame.head.keys().isdisjoint(names):
                frame.columns  # noqa: B018
        for name, flat in found.items():
            values, own = pieces[name][number]
            start = starts[name]
            starts[name] += sum(own)
            np.concatenate(values, out=flat.values[start : starts[name]])
    return found


@dataclass(slots=True, kw_only=True)
class LeasedBlock(RowBlock):
    """Rows of one group that were handed to a stage, with the columns that it reads."""

    deliveries: tuple[int, ...]
    """1 on the first delivery of the row to this stage, one more on each redelivery."""
    packed: PackedTask
    progress: tuple[Frame, ...] = ()
    """Progress that earlier holders appended at this stage, in order."""

    def rows(self) -> list[LeasedRow]:
        """Taken apart. Raises CorruptError."""
        task = self.packed.task
        pieces: list[dict[str, list[Array]]] = [{} for _ in self.indices]
        for frame in self.progress:
            for name in frame.columns:
                for place, array in zip(self.places(frame), frame.split(name), strict=True):
                    pieces[place].setdefault(name, []).append(array)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """One row of a batch's manifest."""

    uid: Uid
    group: str
    """Task id: rows of one group share it and are adjacent."""
    group_size: int
    """As in RowBlock."""
    num_tokens: int
    oldest: Version
    newest: Version
    outcome: Outcome
    prompt_tokens: int = 0
    """As in RowFacts."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Complete groups taken for optimizer step `step`. Payload is fetched apart, by each rank its own rows."""

    batch_id: str
    run: str
    step: int
    groups: tuple[RowBlock, ...]
    """A block of each, with facts and without frames; the manifest knows no finish reasons."""

    @cached_property
    def rows(self) -> tuple[BatchRow, ...]:
        """The rows of all groups, in order."""
        return tuple(
            [
                BatchRow(
                    uid=uid,
                    group=group.task,
                    group_size=group.group_size,
                    num_tokens=facts.num_tokens,
                    oldest=facts.oldest,
                    newest=facts.newest,
                    outcome=facts.outcome,
                    prompt_tokens=facts.prompt_tokens,
                )
                for group in self.groups
                for uid, facts in zip(group.uids(self.run), group.facts, strict=True)
            ]
        )

    @classmethod
    def of_rows(cls, rows: Sequence[BatchRow], *, batch_id: str, run: str, step: int) -> Batch:
        """Make a batch of rows; those of one group are adjacent."""
        groups = [list(members) for _, members in groupby(rows, lambda row: row.group)]
        return cls(
            batch_id=batch_id,
            run=run,
            step=step,
            groups=tuple(
                RowBlock(
                    task=members[0].group,
                    indices=tuple(row.uid.index for row in members),
                    attempts=tuple(row.uid.attempt for row in members),
                    group_size=members[0].group_size,
                    facts=tuple(
                        RowFacts(
                            row.outcome,
                            row.num_tokens,
                            row.oldest,
                            row.newest,
                            "",
                            row.prompt_tokens,
                        )
                        for row in members
                    ),
                )
                for members in groups
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Rows granted to one worker for one stage until `ttl_s` after the grant or the last renewal."""

    stage: str
    worker: str
    ttl_s: float
    blocks: tuple[LeasedBlock, ...]

    @property
    def run(self) -> str:
        """The run of all its rows; empty where it has none."""
        return self.blocks[0].packed.task.run if self.blocks else ""

    @property
    def num_rows(self) -> int:
        """Rows of all blocks, counted without reading them."""
        return sum(map(len, self.blocks))

    def token_of(self) -> dict[Uid, int]:
        """The fencing token of each row."""
        return {uid: block.token for block in self.blocks for uid in block.uids(self.run)}

    @cached_property
    def rows(self) -> tuple[LeasedRow, ...]:
        """The rows of all blocks, in order. Raises CorruptError."""
        return tuple(row for block in self.blocks for row in block.rows())
