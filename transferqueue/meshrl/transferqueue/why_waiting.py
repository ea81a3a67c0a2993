"""An operator's view of a run: which calls wait, for what, and who has it; its size; and its removal.

`why_waiting` visits many groups, so no hot path calls it. A run is removed in one commit, or not at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice

from meshrl.common.plain_text import counted
from meshrl.contract.types import StoredRun, Uid, Waiting
from meshrl.transferqueue.model.group import Grant, Group, bits
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.model.waiting import sampled_by
from meshrl.transferqueue.signals import Wait
from meshrl.transferqueue.store import CommitLog, Table

ATTACHED_S = 120.0
"""A service that has called within this time may call again: clients repeat calls for so long."""
UIDS = 16
"""The most rows that one entry names."""
FAILING_S = 120.0
"""Seconds for which a failure is shown."""
GROUPS = 10_000
"""The most unfinished groups that are visited."""


def why_waiting(run: Run, waits: Iterable[Wait]) -> list[Waiting]:
    """Everything that blocks now, the longest wait first."""
    now = run.clock()
    unfinished = list(islice(_unfinished(run), GROUPS))
    entries = [_call(run, wait, now, unfinished) for wait in waits]
    entries += _held(run, unfinished, now)
    entries += _unheld(run, unfinished, now)
    entries += _failing(run, now)
    return sorted(entries, key=lambda waiting: -waiting.since_s)


def _unfinished(run: Run) -> Iterator[Group]:
    return (g for g in run.groups.values() if g.batch is None and not g.complete and g.unfinished)


def _uids(rows: Iterable[tuple[Group, int]]) -> tuple[Uid, ...]:
    """The names of the first rows."""
    return tuple(islice((g.uid(index) for g, mask in rows for index in bits(mask)), UIDS))


def _call(run: Run, wait: Wait, now: float, unfinished: list[Group]) -> Waiting:
    """The entry of one call; a take waits for the workers that hold rows of the oldest groups, or of those due."""
    what = f"{wait.kind} waits for {wait.reason()}"
    owners: set[str] = set()
    uids: tuple[Uid, ...] = ()
    if wait.kind == "take":
        due_by = wait.due_by()
        waited = [g for g in unfinished if due_by < 0 or sampled_by(g, due_by)]
        uids = _uids((group, group.unfinished) for group in waited)
        owners = {grant.worker for group in waited for grant in group.grants}
        if not unfinished:
            owners = {"feeder"}
    elif wait.kind == "admit":
        owners = {run.record.owner or "trainer"}
    return Waiting(
        who=wait.who, what=what, since_s=now - wait.since, owners=tuple(sorted(owners)), uids=uids
    )


def _held(run: Run, unfinished: list[Group], now: float) -> Iterator[Waiting]:
    """Rows that workers hold, one entry per stage and worker."""
    names = [stage.name for stage in run.stages.ordered]
    by_holder: defaultdict[tuple[int, str], list[Grant]] = defaultdict(list)
    for group in unfinished:
        for grant in group.grants:
            by_holder[grant.stage, grant.worker].append(grant)
    for (stage, worker), leases in by_holder.items():
        oldest = min(grant.since for grant in leases)
        ends = min(run.seconds_left(grant) for grant in leases)
        yield Waiting(
            who=counted(sum(grant.mask.bit_count() for grant in leases), "row"),
            what=f"stage {names[stage]} by {worker}, the first lease ends in {ends:.1f} s",
            since_s=now - oldest,
            owners=(worker,),
            uids=_uids((grant.group, grant.mask) for grant in leases),
        )


def _unheld(run: Run, unfinished: list[Group], now: float) -> Iterator[Waiting]:
    """Rows that a stage could lease and no worker holds, one entry per stage and reason."""
    for stage in run.stages.ordered:
        by_reason: defaultdict[str, list[tuple[Group, int]]] = defaultdict(list)
        for group in unfinished:
            for index in bits(group.leasable(stage.number, stage.after)):
                worker = group.lost_by.get(index)
                lost = f", its lease by {worker} expired" if worker else ""
                by_reason[lost].append((group, 1 << index))
        for lost, rows in by_reason.items():
            yield Waiting(
                who=counted(sum(mask.bit_count() for _, mask in rows), "row"),
                what=f"a worker of stage {stage.name}{lost}",
                since_s=now - min(group.since for group, _ in rows),
                uids=_uids(rows),
            )


def _failing(run: Run, now: float) -> Iterator[Waiting]:
    """Stages whose workers fail, with the last reason: rows that are tried again and again look like slow ones."""
    for stage, failure in run.failures.items():
        if now - failure.last < FAILING_S:
            yield Waiting(
                who=f"stage {stage}",
                what=f"rows that fail ({counted(failure.count, 'time')} since the first): {failure.reason}",
                since_s=now - failure.first,
                uids=(failure.uid,),
            )


DUE = "would be too old at the next step"


def take_due(run: Run, count: int, step: int) -> tuple[int, int]:
    """The result of `due_groups`, once enough other groups are complete; else (-1, 0)."""
    if len(run.complete) < count:
        return -1, 0
    return run.due_groups(run.sampled(step), count)


def take_reason(run: Run, count: int, step: int) -> str:
    """The reason why a take waits, with the numbers."""
    open_groups = len(run.groups) - run.in_batches
    reason = f"{counted(count, 'complete group')} for step {step}: {len(run.complete)} ready, of {open_groups} open"
    if (due := take_due(run, count, step)[1]) > 0:
        reason += f"; {due} that are not {DUE}"
    if open_groups < count:
        closed = "closed" if run.record.feed_closed else "open"
        reason += (
            f"; the feed is {closed}, admission has {counted(run.free_groups(), 'group')} of room"
        )
    return reason


def stored_run(run: Run, waits: list[Wait], called_s: float | None) -> StoredRun:
    """`run`, of which `waits` wait; a service has worked on it `called_s` ago, or never since the queue opened."""
    return StoredRun(
        ledger=run.ledger.snapshot(run.name),
        opened_by=run.record.opened_by,
        epoch=run.record.epoch,
        committed_step=run.record.committed_step,
        feed_closed=run.record.feed_closed,
        dead_letters=len(run.dead_letters),
        attached=tuple(_attached(run, waits, called_s)),
    )


def _attached(run: Run, waits: list[Wait], called_s: float | None) -> Iterator[str]:
    for wait in waits:
        yield f"{wait.who} waits for {wait.reason()}"
    held: dict[tuple[str, int], int] = {}
    for group in run.groups.values():
        for grant in group.grants:
            key = grant.worker, grant.stage
            held[key] = held.get(key, 0) + grant.mask.bit_count()
    for (worker, stage), rows in held.items():
        yield f"{worker} holds {counted(rows, 'row')} of stage {run.stages.ordered[stage].name}"
    if called_s is not None and called_s < ATTACHED_S:
        yield f"a service has worked on it {called_s:.0f} s ago"


def delete_run(run: Run, commit_log: CommitLog) -> None:
    """Stage the deletion of everything that is stored of a run which the queue does not have any more."""
    for key in run.record_keys():
        commit_log.delete(Table.META, key)
    for key in run.needed_payload():
        commit_log.delete(Table.PAYLOAD, key)
    run.end_leases()
    run.notify_all()
