"""Rows that were given up: they are kept with their task and a reason until somebody replays them."""

from __future__ import annotations

from collections.abc import Iterable

from meshrl.contract.types import Outcome, Uid
from meshrl.transferqueue.model.group import Group
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.model.stages import Stage
from meshrl.transferqueue.operations import lifecycle


def dead_letter(
    run: Run, group: Group, index: int, stage: Stage, outcome: Outcome, reason: str
) -> None:
    """The row leaves as a dead letter, and its group does what the policy says."""
    run.dead_letter(group, index, stage, outcome, reason)
    lifecycle.after_dead_letter(run, group, index)
    run.save([group])


def replay(run: Run, uids: Iterable[Uid]) -> int:
    """Admit dead rows again as new attempts; returns how many letters were answered.

    If the group is still open, the row joins it again. If the group is in a batch, the letter stays. If the group has
    left, the whole task comes in again with a new attempt at each index: one sibling could never complete a group.
    """
    answered = 0
    for uid in uids:
        row = run.dead_letters.get(uid)
        if row is None:
            continue
        group = run.groups.get(row.group)
        if group is not None and group.batch is not None:
            continue
        run.remove_dead_letter(row)
        answered += 1
        if group is None:
            group = run.readmit(row)
        elif group.dead >> uid.index & 1:
            run.start_attempts(group, [uid.index])
        run.save([group])
    return answered
