"""Where the columns of rows lie in the store: what a lease or a fetch reads once its transition is durable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshrl.contract.errors import NotFoundError
from meshrl.contract.types import RowBlock
from meshrl.transferqueue.model.group import Group, StoredFrame, bits
from meshrl.transferqueue.model.stages import Stage


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


class Unread(NamedTuple):
    """A block whose frames are still to be read; it stays valid whatever happens to its group meanwhile."""

    block: RowBlock
    task_key: bytes
    frames: tuple[NeededFrame, ...]
    progress: tuple[NeededFrame, ...] = ()
    """The progress that was appended for the rows, in order."""
    deliveries: tuple[int, ...] = ()
    """Of leased rows."""


def wanted(
    group: Group, rows: RowBlock, mask: int, stages: Sequence[Stage], names: Sequence[str]
) -> Unread:
    """Where the columns `names`, which `stages` write, lie for resident `rows`, whose set is `mask`.

    Raises:
        NotFoundError: with `uid`; a stage has not written a row yet.
    """
    for stage in stages:
        if absent := mask & ~group.done[stage.number]:
            uid = group.uid(bits(absent)[0])
            missing = next(name for name in names if name in stage.writes)
            raise NotFoundError(f"row {uid} has no column {missing} yet", uid=uid)
    frames, _ = stored_frames(group, rows.indices, mask, [stage.number for stage in stages])
    return Unread(rows, group.task_key, frames)


def stored_frames(
    group: Group,
    indices: tuple[int, ...],
    mask: int,
    stages: Sequence[int],
    *,
    progress_of: int = -1,
) -> tuple[tuple[NeededFrame, ...], tuple[NeededFrame, ...]]:
    """Where the columns of `stages` (numbers), and the progress of stage `progress_of`, lie for the rows."""
    frames: list[NeededFrame] = []
    progress: list[NeededFrame] = []
    for frame in group.frames:
        needed = frame.stage == progress_of if frame.partial else frame.stage in stages
        if needed and frame.live & mask:
            places, positions = _overlap(indices, frame, mask)
            (progress if frame.partial else frames).append(
                NeededFrame(
                    group.frame_key(frame.number), frame.stage, places, positions, frame.checksum
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
