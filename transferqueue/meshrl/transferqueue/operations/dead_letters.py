"""Rows that were given up: they are kept with their task and a reason until somebody replays them."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from meshrl.contract.rows import DAMAGED, UNTRAINABLE
from meshrl.contract.types import DeadLetter, Outcome, RowBlock, Uid
from meshrl.transferqueue.model.group import Group, bits, task_key
from meshrl.transferqueue.model.records import DeadRow, TakenBatch
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.model.stages import Stage
from meshrl.transferqueue.operations import lifecycle
from meshrl.transferqueue.operations.payload import Damage, PayloadReader

log = logging.getLogger(__name__)

WITH_PROMPT = 1000
"""Letters whose tasks are read when they are listed."""


def dead_letter(
    run: Run, group: Group, index: int, stage: Stage, outcome: Outcome, reason: str
) -> None:
    """The row leaves as a dead letter, and its group does what the policy says."""
    run.dead_letter(group, index, stage, outcome, reason)
    lifecycle.after_dead_letter(run, group, index)
    dropped, total = run.drop_dead_letters(), run.record.dropped_letters
    if dropped and (total == dropped or total // 1000 > (total - dropped) // 1000):
        log.warning(
            "run %s: the oldest dead letters are dropped, %d so far",
            run.name,
            total,
        )
    run.save([group])


def quarantine_leased(run: Run, stage: Stage, rows: RowBlock, fault: str) -> None:
    """Leased rows whose payload is damaged leave as dead letters."""
    for uid in rows.uids(run.name):
        group = run.find(uid)  # a dead letter may take its siblings with it
        if group is None or not group.held_under(stage.number, rows.token) >> uid.index & 1:
            continue
        run.return_rows(stage, group, 1 << uid.index)
        _quarantine(run, group, uid.index, stage, f"{DAMAGED}: {fault}")


def quarantine_taken(run: Run, batch: TakenBatch, damaged: Mapping[int, Damage]) -> None:
    """Damaged rows of a batch that nobody has seen leave as dead letters; `damaged` has them by their group's number.

    Their groups leave the batch, and do what the policy says.
    """
    groups = [group for group in run.groups_of(batch) if group.number in damaged]
    run.take_out(batch, groups)
    for group in groups:
        damage = damaged[group.number]
        for index in bits(damage.rows & group.present):
            if run.groups.get(group.number) is group:  # a dead letter may take its siblings with it
                _quarantine(run, group, index, damage.stage, damage.reason)
        if run.groups.get(group.number) is group:
            lifecycle.offer_if_complete(run, group)


def take_over(run: Run, owner: str) -> None:
    """`owner` has the run now; a trainer that has lost it had the batches that it was told of and has not settled.

    Their groups are complete again, and are known as what it may have died of.
    """
    groups = run.note_deaths([b for b in run.batches.values() if b.answered and not b.settled])
    run.begin_epoch(run.record.epoch + 1, owner)
    if groups and groups[0].deaths >= lifecycle.DEATHS:
        log.warning(
            "run %s: %d trainers died with the groups of task %s and %d others in hand",
            run.name,
            groups[0].deaths,
            groups[0].task_id,
            len(groups) - 1,
        )


def note_failure(run: Run, uids: Sequence[Uid], reason: str) -> None:
    """The step of a batch of one taken group failed; at the second trainer that says so it leaves as dead letters.

    Saying it twice in one epoch is saying it once. Raises NotFoundError, ConflictError; see `lifecycle.taken`.
    """
    for group, mask in lifecycle.taken(run, uids):
        if group.has_failed_before(run.record.epoch):
            rows = [group.uid(index) for index in bits(mask)]
            quarantine_unread(run, rows, f"{UNTRAINABLE}: twice {reason}")
        else:
            run.save([group])


def quarantine_unread(run: Run, uids: Sequence[Uid], reason: str) -> None:
    """Taken rows that their trainer could not read or compute with leave as dead letters, as in `quarantine_taken`.

    Their batches are answered without them from now on. Raises NotFoundError, ConflictError; see `lifecycle.taken`.
    """
    damaged: defaultdict[str, dict[int, Damage]] = defaultdict(dict)
    for group, mask in lifecycle.taken(run, uids):
        assert group.batch is not None
        stage = run.stages.ordered[0]
        damaged[group.batch.batch_id][group.number] = Damage(mask, stage, reason)
    for batch_id, groups in damaged.items():
        quarantine_taken(run, run.batches[batch_id], groups)
        lifecycle.rewrite_manifest(run, run.batches[batch_id])


async def with_prompts(rows: Sequence[DeadRow], payload: PayloadReader) -> Sequence[DeadLetter]:
    """The letters of `rows`; the last ones say what was asked."""
    keys = [task_key(row.run_number, row.group) for row in rows]
    prompts = await payload.prompts(list(dict.fromkeys(keys[-WITH_PROMPT:])))
    return [
        replace(row.letter, prompt=prompts.get(key, ""))
        for row, key in zip(rows, keys, strict=True)
    ]


def _quarantine(run: Run, group: Group, index: int, stage: Stage, reason: str) -> None:
    dead_letter(run, group, index, stage, Outcome.INFRA_FAULT, reason)


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
