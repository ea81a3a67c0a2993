"""When a group is complete, and what happens to it when a row dies or grows too old."""

from __future__ import annotations

from meshrl.contract.types import GroupPolicy, StalePolicy
from meshrl.transferqueue.model.group import Group
from meshrl.transferqueue.model.records import Exit, State
from meshrl.transferqueue.model.run import Run

INCOMPLETE = "group_incomplete"
"""The reason with which siblings of a dead row leave."""
SPARE = "k_of_n"
"""The reason with which unfinished rows leave when the k rows that were asked for are taken."""
REISSUED, DROPPED = "reissued", "dropped"

READY = list(State).index(State.READY)


def is_complete(run: Run, group: Group) -> bool:
    """True when a group that is in no batch may be taken.

    `all` and `replace_sibling` need every row. `k_of_n` needs k; the unfinished rows go on until the group is taken.
    """
    wanted = group.size
    if run.spec.group_policy is GroupPolicy.K_OF_N:
        wanted = run.spec.group_k
    return group.counts[READY] >= wanted


def offer_if_complete(run: Run, group: Group) -> None:
    """Rows of the group got a column, maybe their last."""
    if not group.complete and group.batch is None and is_complete(run, group):
        run.offer(group)


def after_dead_letter(run: Run, group: Group, index: int) -> None:
    """The row at `index` of an open group was dead-lettered: replace it, go on without it, or drop the group."""
    policy = run.spec.group_policy
    replacements = group.replacements[index]
    if policy is GroupPolicy.REPLACE_SIBLING and replacements < run.spec.max_attempts:
        run.start_attempts(group, [index], replacements=replacements + 1)
        return
    run.mark_dead(group, index)
    if policy is not GroupPolicy.K_OF_N or group.present.bit_count() < run.spec.group_k:
        run.remove_group(group, Exit.FILTERED, INCOMPLETE)


def too_old(run: Run, group: Group, step: int) -> bool:
    """True when a row of the group was sampled more than `max_staleness` steps before `step`."""
    oldest = min([facts.oldest.step for facts in group.facts_of(group.present)], default=step)
    return step - oldest > run.spec.max_staleness


def retire(run: Run, group: Group) -> None:
    """The group is too old: every row leaves as stale; `reissue` samples the task again in its old place."""
    if run.spec.stale_policy is StalePolicy.DROP:
        run.remove_group(group, Exit.STALE, DROPPED)
        run.save()
        return
    run.reissue(group, REISSUED)
    run.save([group])
