"""Progress: what a stage has made so far of a row that it has not written yet; the next worker continues from it.

    lease ──▶ append [0, 32) ──▶ append [32, 64) ──▶ (the worker dies) ──▶ lease: prefix of 64 entries ──▶ write

Each append is a frame; the stage's write, or the end of the row's attempt, deletes them all.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshrl.contract.errors import ConflictError, UserError
from meshrl.contract.types import RowBlock, Uid
from meshrl.transferqueue.model.group import Group
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.model.stages import Stage
from meshrl.transferqueue.operations import leases, payload


def checked(run: Run, stage: Stage, blocks: Sequence[RowBlock]) -> list[leases.CheckedBlock]:
    """The checked appends; entries that were appended before are skipped.

    Raises:
        FencedError: with `uid`; another worker holds the row, or the lease ended.
        ConflictError: with `uid`; the entries before these are missing.
        UserError: a column is wrong or a row is named twice (with `uid`), or the stage reads columns.
    """
    if not stage.first:
        raise UserError(f"stage {stage.name} reads columns: only a stage that samples can append")
    appends: list[leases.CheckedBlock] = []
    named: set[tuple[int, int]] = set()
    for block in blocks:
        if len(block.starts) != len(block):
            raise UserError(f"append: {len(block)} rows of task {block.task} without their starts")
        leases.check_frame(run, block)
        lengths = _lengths(run, block)
        payload.check_progress(run, block, lengths)
        group = run.by_task.get(block.task)
        held = group.held_under(stage.number, block.token) if group else 0
        new: list[int] = []
        for at, (index, attempt) in enumerate(zip(block.indices, block.attempts, strict=True)):
            if group is None or not (group.has(index, attempt) and held >> index & 1):
                uid = Uid(run.name, block.task, index, attempt)
                raise leases.fenced(run, stage, uid, block.token)
            known = group.recorded_progress[index] if group.recorded_progress else 0
            if block.starts[at] > known:
                raise ConflictError(
                    f"row {group.uid(index)}: entries {known} to {block.starts[at]} were never"
                    f" appended",
                    uid=group.uid(index),
                )
            if (group.number, index) in named:
                uid = group.uid(index)
                raise UserError(f"row {uid} is appended to twice in one call", uid=uid)
            named.add((group.number, index))
            if block.starts[at] == known and lengths[at]:
                new.append(at)
        if group is not None and new:
            part = block if len(new) == len(block) else block.part(new)
            appends.append((group, sum(1 << index for index in part.indices), part))
    return appends


def _lengths(run: Run, block: RowBlock) -> Sequence[int]:
    """Entries of each row, equally many in each column. Raises UserError, with `uid`."""
    frame = block.frame
    lengths = {column.lengths or () for column in frame.columns.values()}
    if len(lengths) != 1 or len(next(iter(lengths))) != frame.rows:
        uid = Uid(run.name, block.task, block.indices[0], block.attempts[0])
        raise UserError(f"row {uid}: appended columns must have equally many entries", uid=uid)
    return lengths.pop()


def append(run: Run, stage: Stage, appends: Sequence[leases.CheckedBlock]) -> None:
    """Store checked appends."""
    for group, mask, block in appends:
        run.append(stage, group, mask, block)
    run.save([group for group, _, _ in appends])


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
