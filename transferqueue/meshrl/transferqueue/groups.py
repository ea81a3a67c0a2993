"""When a group is complete, and what becomes of it when a row dies or grows too old."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshrl.contract.nouns import GroupPolicy, StalePolicy
from meshrl.transferqueue.ledger import Exit
from meshrl.transferqueue.rows import Group, Row, facts_of

if TYPE_CHECKING:
    from meshrl.transferqueue.run import Run

INCOMPLETE = "group_incomplete"
"""Why siblings of a dead row leave."""
SPARE = "k_of_n"
"""Why unfinished rows leave when the k that were asked for are taken."""
REISSUED, DROPPED = "reissued", "dropped"


def is_complete(run: Run, group: Group) -> bool:
    """True when the group may be taken.

    `all` and `replace_sibling` want every row. `k_of_n` wants k; its unfinished rows go on until the group is taken.
    """
    if run.spec.group_policy is GroupPolicy.K_OF_N:
        return group.ready >= run.spec.group_k
    return group.ready == group.size


def finished_row(run: Run, group: Group) -> None:
    """A row got its last column."""
    if not group.complete and is_complete(run, group):
        run.offer(group)


def lost_row(run: Run, row: Row) -> None:
    """A row of an open group was dead-lettered."""
    group, policy = row.group, run.spec.group_policy
    if policy is GroupPolicy.REPLACE_SIBLING and row.replacements < run.spec.max_attempts:
        group.attempts[row.index] += 1
        run.add_row(group, row.index).replacements = row.replacements + 1
        return
    group.dead.add(row.index)
    if policy is not GroupPolicy.K_OF_N or len(group.rows) < run.spec.group_k:
        run.remove_group(group, Exit.FILTERED, INCOMPLETE)


def too_old(run: Run, group: Group, step: int) -> bool:
    """True when a row of the group was sampled more than `max_staleness` steps before `step`."""
    oldest = min((facts.oldest.step for facts in facts_of(group.rows.values())), default=step)
    return step - oldest > run.spec.max_staleness


def retire(run: Run, group: Group) -> None:
    """The group is too old: every row leaves as stale; by policy the task is sampled anew in its old place."""
    if run.spec.stale_policy is StalePolicy.DROP:
        run.remove_group(group, Exit.STALE, DROPPED)
        run.save()
        return
    run.withdraw(group)
    for row in list(group.rows.values()):
        run.remove_row(row, Exit.STALE, REISSUED)
    group.dead.clear()
    group.position = -1
    group.attempts = [attempt + 1 for attempt in group.attempts]
    for index in range(group.size):
        run.add_row(group, index)
    run.save([group])
