"""Columns: what stages may write (types, lengths and values), and where in the store lies what was written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshrl.contract.errors import CorruptError, NotFoundError, UserError
from meshrl.contract.frames import Column, Frame
from meshrl.contract.row_values import value_fault
from meshrl.contract.types import (
    CONVERSATION,
    DATA_SOURCE,
    NOTES,
    REWARD_TIMES,
    ROLLOUT_TIMES,
    ROUTED_EXPERTS,
    ROW_MEDIA,
    RowBlock,
    Uid,
)
from meshrl.transferqueue.model.group import Group, StoredFrame, bits
from meshrl.transferqueue.model.rows import ResidentRows, Stage

_I4, _I8, _U1, _F4, _F8 = map(np.dtype, ("<i4", "<i8", "u1", "<f4", "<f8"))
TYPES: Mapping[str, tuple[np.dtype[Any], int]] = {
    "tokens": (_I4, 1),
    "loss_mask": (_U1, 1),
    "rollout_logprobs": (_F4, 1),
    "spans": (_I8, 2),
    "response_text": (_U1, 1),
    "replica": (_U1, 1),
    "posted_reward": (_U1, 1),
    "reward": (_F4, 1),
    "reward_components": (_U1, 1),
    "reward_hash": (_U1, 1),
    "token_rewards": (_F4, 1),
    "ref_logprobs": (_F4, 1),
    "ref_top_ids": (_I4, 2),
    "ref_top_logprobs": (_F4, 2),
    ROUTED_EXPERTS: (_U1, 1),
    ROLLOUT_TIMES: (_F8, 1),
    CONVERSATION: (_U1, 1),
    ROW_MEDIA: (_U1, 1),
    REWARD_TIMES: (_F8, 1),
    DATA_SOURCE: (_U1, 1),
}
"""Name to (dtype, rank); any other column may have any storable type."""
PER_TOKEN = frozenset(
    {
        "tokens",
        "loss_mask",
        "rollout_logprobs",
        "token_rewards",
        "ref_logprobs",
        "ref_top_ids",
        "ref_top_logprobs",
    }
)


class _Refused(Exception):
    """Why a write is refused, and for which position of the frame."""

    def __init__(self, problem: str, position: int = 0) -> None:
        super().__init__(problem)
        self.position = position


def check(run: ResidentRows, write: RowBlock, stage: Stage, group: Group | None) -> None:
    """Check a write to `stage`, for all its rows at once.

    Raises:
        UserError: with `uid`; names the column, what it is and what it must be.
    """
    frame = write.frame
    try:
        _check_names(frame, stage)
        if stage.first:
            lengths = _lengths_by_facts(write, stage)
        elif write.facts:
            raise _Refused(f"facts come with the first stage, not with {stage.name}")
        else:
            known = [group.facts[index] if group else None for index in write.indices]
            lengths = tuple([facts.num_tokens if facts else 0 for facts in known])
        for name, column in frame.columns.items():
            _check_column(name, column, lengths, run.spec.vocabulary)
    except _Refused as refused:
        raise _named(refused, run, write) from None


def check_progress(run: ResidentRows, write: RowBlock, lengths: Sequence[int]) -> None:
    """Check entries that are appended, `lengths` of them to each row. Raises UserError as `check` does."""
    try:
        for name, column in write.frame.columns.items():
            _check_column(name, column, tuple(lengths), run.spec.vocabulary)
    except _Refused as refused:
        raise _named(refused, run, write) from None


def _named(refused: _Refused, run: ResidentRows, rows: RowBlock) -> UserError:
    at = refused.position
    uid = Uid(run.name, rows.task, rows.indices[at], rows.attempts[at])
    return UserError(f"row {uid}: {refused}", uid=uid)


def _check_names(frame: Frame, stage: Stage) -> None:
    if tuple(frame.columns) == stage.writes:
        return
    known = (*stage.writes, *NOTES.get(stage.name, ()))
    unknown = [name for name in frame.columns if name not in known]
    missing = [name for name in stage.writes if name not in frame.columns]
    if unknown or missing:
        wrong = f"{unknown[0]} is not" if unknown else f"{missing[0]} is missing"
        raise _Refused(f"column {wrong} in what stage {stage.name} writes: {stage.writes}")


def _lengths_by_facts(write: RowBlock, stage: Stage) -> tuple[int, ...]:
    if len(write.facts) != len(write.indices):
        raise _Refused(f"stage {stage.name} must give the row's facts")
    for position, facts in enumerate(write.facts):
        if not facts.outcome.trainable:
            raise _Refused(f"outcome {facts.outcome} can never be trained on: use fail", position)
        if facts.newest < facts.oldest or not 0 <= facts.prompt_tokens <= facts.num_tokens:
            raise _Refused(f"facts make no sense: {facts}", position)
    return tuple([facts.num_tokens for facts in write.facts])


def _check_column(name: str, column: Column, num_tokens: tuple[int, ...], vocabulary: int) -> None:
    entry = column.entry
    dtype, rank = TYPES.get(name, (entry.dtype, entry.rank))
    if entry.dtype != dtype or entry.rank != rank:
        raise _Refused(f"column {name} is {_shape(column)}, want {dtype} of rank {rank}")
    if column.lengths is None:
        return
    if name in PER_TOKEN and column.lengths != num_tokens:
        pairs = enumerate(zip(column.lengths, num_tokens, strict=True))
        position, (length, wanted) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
        raise _Refused(f"column {name} has {length} entries, the row {wanted} tokens", position)
    if name == "spans" and entry.tail != (4,):
        raise _Refused(f"column spans is {_shape(column)}, want int64[n, 4]")
    if name == "reward":
        _check_reward(column)
    elif fault := value_fault(
        name, column.values, column.lengths, tokens=num_tokens, vocabulary=vocabulary
    ):
        raise _Refused(fault.problem, fault.row)


def _check_reward(column: Column) -> None:
    lengths, values = column.lengths or (), column.values
    # For a few numbers, this takes less time than one call of numpy.
    if lengths.count(1) == len(lengths) and all(map(math.isfinite, values.tolist())):
        return
    at = 0
    for position, length in enumerate(lengths):
        array = values[at : at + length]
        if length != 1 or not np.isfinite(array[0]):
            raise _Refused(f"column reward is {array}, want one finite number", position)
        at += length


def _shape(column: Column) -> str:
    first = [] if column.lengths is None else [column.lengths[0]]
    return f"{column.entry.dtype.name}{[*first, *column.entry.tail]}"


def check_frame(run: ResidentRows, block: RowBlock) -> None:
    """Compare the frame with its checksum and with the rows that the block names. Raises UserError, with `uid`."""
    if not block.indices:
        raise UserError(f"a write to task {block.task!r} names no row", task=block.task)
    uid = Uid(run.name, block.task, block.indices[0], block.attempts[0])
    frame = block.frame
    try:
        frame.columns  # noqa: B018
    except CorruptError as error:
        raise UserError(f"row {uid}: {error.message}", uid=uid) from error
    rows = frame.rows
    in_order = frame.places is None or frame.places == tuple(range(rows))
    if rows != len(block) or len(set(block.indices)) != rows or not in_order:
        raise UserError(f"row {uid}: {len(block)} rows are named, the frame has {rows}", uid=uid)


def entries(run: ResidentRows, block: RowBlock) -> Sequence[int]:
    """Entries of each row, equally many in each column. Raises UserError, with `uid`."""
    frame = block.frame
    lengths = {column.lengths or () for column in frame.columns.values()}
    if len(lengths) != 1 or len(next(iter(lengths))) != frame.rows:
        uid = Uid(run.name, block.task, block.indices[0], block.attempts[0])
        raise UserError(f"row {uid}: appended columns must have equally many entries", uid=uid)
    return lengths.pop()


class InBatch(NamedTuple):
    """One frame of a batch."""

    key: bytes
    frame: StoredFrame
    group: int
    """Number of its group."""
    task: str
    stage: Stage
    """The one that wrote it."""


class Damage(NamedTuple):
    """Rows of one group whose payload is not what was written."""

    rows: int
    """Their set."""
    stage: Stage
    """The one that wrote what is damaged."""
    reason: str
    """The reason in their dead letters."""


class NeededFrame(NamedTuple):
    """A stored frame, and which of its rows are needed."""

    key: bytes
    stage: int
    places: tuple[int, ...]
    """For each needed row, its place in the block."""
    positions: tuple[int, ...] | None
    """For each needed row, its position in the frame; None: every row of the frame, in order."""
    checksum: int
    """The checksum that the frame must have: it detects a store that returns the frame of another row."""
    nbytes: int
    """Size of the whole frame."""


class Unread(NamedTuple):
    """A block whose frames are still to be read; it stays valid whatever happens to its group meanwhile."""

    block: RowBlock
    task_key: bytes
    frames: tuple[NeededFrame, ...]
    progress: tuple[NeededFrame, ...] = ()
    """The progress that was appended for the rows, in order."""
    deliveries: tuple[int, ...] = ()
    """Delivery count of each row, if they are leased."""
    task_bytes: int = 0
    """Size of the task's payload, if it is needed too."""

    @property
    def nbytes(self) -> int:
        """About the bytes in memory once it is read."""
        return self.task_bytes + sum([frame.nbytes for frame in (*self.frames, *self.progress)])


def wanted(
    group: Group,
    rows: RowBlock,
    mask: int,
    stages: Sequence[Stage],
    names: Sequence[str],
    *,
    with_task: bool,
) -> Unread:
    """Locate the columns `names`, which `stages` write, of resident `rows`, whose set is `mask`.

    Raises:
        NotFoundError: with `uid`; a stage has not written a row yet.
    """
    for stage in stages:
        if absent := mask & ~group.done[stage.number]:
            uid = group.uid(bits(absent)[0])
            missing = next(name for name in names if name in stage.writes)
            raise NotFoundError(f"row {uid} has no column {missing} yet", uid=uid)
    frames, _ = stored_frames(group, rows.indices, mask, [stage.number for stage in stages])
    task_bytes = group.task_bytes if with_task else 0
    return Unread(rows, group.task_key, frames, task_bytes=task_bytes)


def stored_frames(
    group: Group,
    indices: tuple[int, ...],
    mask: int,
    stages: Sequence[int],
    *,
    progress_of: int = -1,
) -> tuple[tuple[NeededFrame, ...], tuple[NeededFrame, ...]]:
    """Locate the columns of `stages` (numbers), and the progress of stage `progress_of`, for the rows."""
    frames: list[NeededFrame] = []
    progress: list[NeededFrame] = []
    for frame in group.frames:
        needed = frame.stage == progress_of if frame.partial else frame.stage in stages
        if needed and frame.live & mask:
            places, positions = _overlap(indices, frame, mask)
            (progress if frame.partial else frames).append(
                NeededFrame(
                    group.frame_key(frame.number),
                    frame.stage,
                    places,
                    positions,
                    frame.checksum,
                    frame.nbytes,
                )
            )
    return tuple(frames), tuple(progress)


def _overlap(
    indices: tuple[int, ...], frame: StoredFrame, mask: int
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """`places` and `positions` of NeededFrame for a frame's rows that are in `indices`, whose set is `mask`."""
    if frame.rows == indices and frame.live & mask == mask:
        return bits((1 << len(indices)) - 1), None
    place = {index: at for at, index in enumerate(indices)}
    pairs = [
        (place[index], position)
        for position, index in enumerate(frame.rows)
        if index in place and frame.live >> index & 1
    ]
    all_rows = len(pairs) == len(frame.rows)
    return tuple([at for at, _ in pairs]), None if all_rows else tuple([at for _, at in pairs])
