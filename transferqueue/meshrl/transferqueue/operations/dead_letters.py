"""Rows that were given up: kept with their task and their reason until somebody replays them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshrl.contract.types import DeadLetter, Json, Outcome, Uid
from meshrl.transferqueue.model import policies
from meshrl.transferqueue.model.group import Group, TaskMetadata
from meshrl.transferqueue.model.ledger import Exit
from meshrl.transferqueue.model.stages import Stage
from meshrl.transferqueue.records import encode_record
from meshrl.transferqueue.store import Table

if TYPE_CHECKING:
    from meshrl.transferqueue.model.run import Run


@dataclass(slots=True, eq=False)
class DeadRow:
    """A dead letter, with what a replay needs when the group is gone."""

    run_number: int
    number: int
    letter: DeadLetter
    group: int
    metadata: TaskMetadata
    task_bytes: int
    attempts: list[int]
    """Of every index of the group, as it was when the group left."""

    @property
    def key(self) -> bytes:
        """Of the record."""
        return b"d" + self.run_number.to_bytes(4, "big") + self.number.to_bytes(8, "big")

    def encode(self) -> bytes:
        """The record."""
        letter = self.letter
        return encode_record(
            [
                *(self.number, str(letter.uid), letter.stage, letter.outcome, letter.reason),
                *(letter.attempts, self.group, tuple(self.metadata), self.task_bytes),
                self.attempts,
            ]
        )

    @classmethod
    def restored(cls, run_number: int, stored: Json) -> DeadRow:
        """The inverse of `encode`."""
        number, uid, stage, outcome, reason, tried, group, metadata, task_bytes, attempts = stored
        letter = DeadLetter(
            uid=Uid.parse(uid),
            stage=stage,
            outcome=Outcome(outcome),
            reason=reason,
            attempts=tried,
        )
        return cls(run_number, number, letter, group, TaskMetadata(*metadata), task_bytes, attempts)


def dead_letter(
    run: Run, group: Group, index: int, stage: Stage, outcome: Outcome, reason: str
) -> None:
    """The row leaves as a dead letter, and its group does what the policy says."""
    dead = DeadRow(
        run_number=run.number,
        number=run.next_dead,
        letter=DeadLetter(
            uid=group.uid(index),
            stage=stage.name,
            outcome=outcome,
            reason=reason,
            attempts=group.deliveries[stage.number][index],
        ),
        group=group.number,
        metadata=group.metadata,
        task_bytes=group.task_bytes,
        attempts=list(group.attempts),
    )
    run.next_dead += 1
    keep(run, dead)
    run.commit_log.touch(dead)
    run.remove_rows(group, 1 << index, Exit.DEAD, reason)
    policies.lost_row(run, group, index)
    run.save([group])


def keep(run: Run, dead: DeadRow) -> None:
    """File a dead letter."""
    run.dead[dead.letter.uid] = dead
    run.dead_of.setdefault(dead.group, []).append(dead)


def replay(run: Run, uids: list[Uid]) -> int:
    """Admit dead rows again as new attempts; returns how many letters were answered.

    Where the group is still open the row joins it again. Where it left, the whole task comes in again, each index as
    a new attempt: one sibling alone could never make a group. A letter whose group is in a batch stays.
    """
    answered = 0
    for uid in uids:
        dead = run.dead.get(uid)
        if dead is None:
            continue
        group = run.groups.get(dead.group)
        if group is not None and group.batch is not None:
            continue
        _forget(run, dead)
        answered += 1
        if group is None:
            group = run.new_group(
                dead.group,
                uid.task,
                metadata=dead.metadata,
                task_bytes=dead.task_bytes,
                attempts=[attempt + 1 for attempt in dead.attempts],
            )
            run.add_group(group)
        elif group.dead >> uid.index & 1:
            group.dead &= ~(1 << uid.index)
            group.attempts[uid.index] += 1
            run.add_rows(group, [uid.index])
        run.save([group])
    return answered


def _forget(run: Run, dead: DeadRow) -> None:
    del run.dead[dead.letter.uid]
    letters = run.dead_of[dead.group]
    letters.remove(dead)
    if not letters:
        del run.dead_of[dead.group]
    run.commit_log.delete(Table.META, dead.key)
