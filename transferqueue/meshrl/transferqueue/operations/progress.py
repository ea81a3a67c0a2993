"""Work in progress: what a stage has made of a row that it has not written yet, kept for whoever holds the row next.

    lease ──▶ append [0, 32) ──▶ append [32, 64) ──▶ (the holder dies) ──▶ lease: prefix of 64 entries ──▶ write

A frame per append; the stage's write, or the end of the row's attempt, drops them all.
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
from meshrl.transferqueue.operations import leases


class CheckedAppend(NamedTuple):
    """Entries that are new."""

    group: Group
    rows: tuple[int, ...]
    entries: tuple[int, ...]
    """Per row: entries with these."""
    frame: bytes


def checked(run: Run, stage: Stage, groups: Sequence[ProgressGroup]) -> list[CheckedAppend]:
    """What is to be kept; entries that were appended before are passed over.

    Raises:
        FencedError: with `uid`; somebody else has the row, or the lease ended.
        ConflictError: with `uid`; entries before these are missing.
        UserError: with `uid`; columns of unequal length, or a stage that reads columns.
    """
    if not stage.first:
        raise UserError(f"stage {stage.name} reads columns: only a stage that samples can append")
    found: list[CheckedAppend] = []
    for given in groups:
        frame = leases.read_frame(run, given)
        lengths = _lengths(run, given, frame)
        group = run.by_task.get(given.task)
        held = group.held_under(stage.number, given.token) if group else 0
        kept: list[int] = []
        for at, (index, attempt) in enumerate(zip(given.indices, given.attempts, strict=True)):
            if group is None or not (group.has(index, attempt) and held >> index & 1):
                raise leases.fenced(
                    run, stage, Uid(run.name, given.task, index, attempt), given.token
                )
            known = group.recorded_progress[index] if group.recorded_progress else 0
            if given.starts[at] > known:
                raise ConflictError(
                    f"row {group.uid(index)}: entries {known} to {given.starts[at]} were never"
                    f" appended",
                    uid=group.uid(index),
                )
            if given.starts[at] == known and lengths[at]:
                kept.append(at)
        if group is not None and kept:
            found.append(
                CheckedAppend(
                    group,
                    tuple([given.indices[at] for at in kept]),
                    tuple([given.starts[at] + lengths[at] for at in kept]),
                    frame.select(frame.columns, kept),
                )
            )
    return found


def _lengths(run: Run, given: ProgressGroup, frame: Frame) -> list[int]:
    lengths = {
        column.lengths if column.lengths is not None else () for column in frame.columns.values()
    }
    if len(lengths) != 1 or len(next(iter(lengths))) != frame.rows:
        uid = Uid(run.name, given.task, given.indices[0], given.attempts[0])
        raise UserError(f"row {uid}: appended columns must have equally many entries", uid=uid)
    return list(lengths.pop())


def append(run: Run, stage: Stage, appends: Sequence[CheckedAppend]) -> None:
    """Keep what was checked."""
    for item in appends:
        run.append(stage, item.group, item.rows, item.entries, item.frame)
    run.save([item.group for item in appends])


def redo(run: Run, stage: Stage, uids: Sequence[Uid]) -> int:
    """Rows of groups that are in no batch go back to before `stage`; no uids mean all. Returns how many did.

    Raises:
        UserError: a stage that samples; what it made cannot be made again.
    """
    if stage.first:
        raise UserError(f"stage {stage.name} samples: what it made cannot be made again")
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
