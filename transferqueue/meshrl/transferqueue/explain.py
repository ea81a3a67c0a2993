"""`why_waiting`: who waits for what, and who has it. For people: it walks over groups, so no hot path calls it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from meshrl.contract.nouns import Uid, Waiting
from meshrl.transferqueue import admission
from meshrl.transferqueue.rows import Group, Held, Row
from meshrl.transferqueue.waiting import Wait

if TYPE_CHECKING:
    from meshrl.transferqueue.run import Run

UIDS = 16
"""At most so many rows are named in one line."""
GROUPS = 10_000
"""At most so many unfinished groups are looked at."""


def why_waiting(run: Run, waits: Iterable[Wait]) -> list[Waiting]:
    """Everything that blocks now, the longest wait first."""
    now = run.clock()
    unfinished = list(islice(_unfinished(run), GROUPS))
    found = [_call(run, wait, now, unfinished) for wait in waits]
    found += _held(run, unfinished, now)
    found += _unheld(run, unfinished, now)
    return sorted(found, key=lambda waiting: -waiting.since_s)


def _unfinished(run: Run) -> Iterator[Row]:
    groups = (group for group in run.groups.values() if _open(group))
    return (row for group in groups for row in group.rows.values() if not run.finished(row))


def _open(group: Group) -> bool:
    return group.batch is None and not group.complete


def _call(run: Run, wait: Wait, now: float, unfinished: list[Row]) -> Waiting:
    """One call; a take is blamed on whoever holds what the oldest groups miss."""
    what = f"{wait.kind} waits for {wait.reason()}"
    owners: set[str] = set()
    uids: tuple[Uid, ...] = ()
    if wait.kind == "take":
        uids = tuple(row.uid for row in unfinished[:UIDS])
        owners = {held.worker for row in unfinished for held in row.held.values()}
        if not unfinished:
            owners = {"feeder"}
    elif wait.kind == "admit":
        owners = {run.owner or "trainer"}
    return Waiting(
        who=wait.who, what=what, since_s=now - wait.since, owners=tuple(sorted(owners)), uids=uids
    )


def _held(run: Run, unfinished: list[Row], now: float) -> Iterator[Waiting]:
    """Rows in somebody's hands, one line per stage and worker."""
    names = {stage.number: stage.name for stage in run.stages}
    by_holder: defaultdict[tuple[int, str], list[Held]] = defaultdict(list)
    for row in unfinished:
        for held in row.held.values():
            by_holder[held.stage, held.worker].append(held)
    for (stage, worker), leases in by_holder.items():
        oldest = min(held.since for held in leases)
        ends = min(held.deadline for held in leases) - now
        yield Waiting(
            who=f"{len(leases)} rows",
            what=f"stage {names[stage]} by {worker}, the first lease ends in {ends:.1f} s",
            since_s=now - oldest,
            owners=(worker,),
            uids=tuple(held.row.uid for held in leases[:UIDS]),
        )


def _unheld(run: Run, unfinished: list[Row], now: float) -> Iterator[Waiting]:
    """Rows that a stage could work on and that nobody holds, one line per stage and reason."""
    for stage in run.stages:
        by_reason: defaultdict[str, list[Row]] = defaultdict(list)
        for row in unfinished:
            done = row.done & (stage.needs | stage.bit)
            if done == stage.needs and stage.number not in row.held:
                lost = f", its lease by {row.lost_by} expired" if row.lost_by else ""
                by_reason[lost].append(row)
        for lost, rows in by_reason.items():
            yield Waiting(
                who=f"{len(rows)} rows",
                what=f"a worker of stage {stage.name}{lost}",
                since_s=now - min(row.since for row in rows),
                uids=tuple(row.uid for row in rows[:UIDS]),
            )


def take_reason(run: Run, count: int, step: int) -> str:
    """What a take waits for."""
    open_groups = len(run.groups) - run.in_batches
    reason = f"{count} complete groups for step {step}: {run.complete} are, of {open_groups} open"
    if open_groups < count:
        closed = "closed" if run.feed_closed else "open"
        reason += f"; the feed is {closed}, admission has {admission.room(run)} groups of room"
    return reason
