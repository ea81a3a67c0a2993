"""Progress: what a stage has made so far of a row that it has not written yet; the next worker continues from it.

    lease ──▶ append [0, 32) ──▶ append [32, 64) ──▶ (the worker dies) ──▶ lease: prefix of 64 entries ──▶ write

Each append is a frame; the stage's write, or the end of the row's attempt, deletes them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshrl.contract.errors import ConflictError, UserError
from meshrl.contract.frames import Frame
from meshrl.contract.types import ProgressGroup, Uid
from meshrl.transferqueue.model.group import Group
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.model.stages import Stage
from meshrl.transferqueue.operations import leases, payload


class CheckedAppend(NamedTuple):
    """Checked entries that are new."""

    group: Group
    rows: tuple[int, ...]
    entries: tuple[int, ...]
    """Per row: the number of entries including these."""
    frame: bytes


def checked(run: Run, stage: Stage, groups: Sequence[ProgressGroup]) -> list[CheckedAppend]:
    """The checked appends; entries that were appended before are skipped.

    Raises:
        FencedError: with `uid`; another worker holds the row, or the lease ended.
        ConflictError: with `uid`; the entries before these are missing.
        UserError: a column is wrong or a row is named twice (with `uid`), or the stage reads columns.
    """
    if not stage.first:
        raise UserError(f"stage {stage.name} reads columns: only a stage that samples can append")
    appends: list[CheckedAppend] = []
    named: set[tuple[int, int]] = set()
    for group_rows in groups:
        frame = leases.read_frame(run, group_rows)
        lengths = _lengths(run, group_rows, frame)
        payload.check_progress(run, group_rows, frame, lengths)
        group = run.by_task.get(group_rows.task)
        held = group.held_under(stage.number, group_rows.token) if group else 0
        new: list[int] = []
        for at, (index, attempt) in enumerate(
            zip(group_rows.indices, group_rows.attempts, strict=True)
        ):
            if group is None or not (group.has(index, attempt) and held >> index & 1):
                raise leases.fenced(
                    run, stage, Uid(run.name, group_rows.task, index, attempt), group_rows.token
                )
            known = group.recorded_progress[index] if group.recorded_progress else 0
            if group_rows.starts[at] > known:
                raise ConflictError(
                    f"row {group.uid(index)}: entries {known} to {group_rows.starts[at]} were never"
                    f" appended",
                    uid=group.uid(index),
                )
            if (group.number, index) in named:
                uid = group.uid(index)
                raise UserError(f"row {uid} is appended to twice in one call", uid=uid)
            named.add((group.number, index))
            if group_rows.starts[at] == known and lengths[at]:
                new.append(at)
        if group is not None and new:
            appends.append(
                CheckedAppend(
                    group,
                    tuple([group_rows.indices[at] for at in new]),
                    tuple([group_rows.starts[at] + lengths[at] for at in new]),
                    frame.select(frame.columns, new),
                )
            )
    return appends


def _lengths(run: Run, group_rows: ProgressGroup, frame: Frame) -> list[int]:
    lengths = {
        column.lengths if column.lengths is not None else () for column in frame.columns.values()
    }
    if len(lengths) != 1 or len(next(iter(lengths))) != frame.rows:
        uid = Uid(run.name, group_rows.task, group_rows.indices[0], group_rows.attempts[0])
        raise UserError(f"row {uid}: appended columns must have equally many entries", uid=uid)
    return list(lengths.pop())


def append(run: Run, stage: Stage, appends: Sequence[CheckedAppend]) -> None:
    """Store checked appends."""
    for item in appends:
        run.append(stage, item.group, item.rows, item.entries, item.frame)
    run.save([item.group for item in appends])


def redo(run: Run, stage: Stage, uids: Sequence[Uid]) -> int:
    """Rows of groups that are in no batch go back to before `stage`; no uids means all rows. Returns how many did.

    Raises:
        UserError: `stage` samples; its columns cannot be made again.
    """
    if stage.first:
        raise UserError(f"stage {stage.name} samples: its columns cannot be made again")
    masks: dict[int, int] = {}
    for uid in uids:
        if (group := run.find(uid)) is not None:
            masks[group.number] = masks.get(group.number, 0) | 1 << uid.index
    if not uids:
        masks = {number: group.present for number, group in run.groups.items()}
    again = run.stages.depending_on(stage)
    touched: list[Group] = []
    rows = 0
    for number, mask in masks.items():
        group = run.groups[number]
        mask &= group.done[stage.number]
        if group.batch is not None or not mask:
            continue
        rows += mask.bit_count()
        run.undo(again, group, mask)
        touched.append(group)
    run.save(touched)
    return rows
