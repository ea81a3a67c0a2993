"""Runs as an operator sees them, and the removal of one: all of it in one commit, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshrl.common.plain_text import counted
from meshrl.contract.types import Ledger
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.signals import Wait
from meshrl.transferqueue.store import CommitLog, Table

ATTACHED_S = 120.0
"""A service that has called within this time may call again: clients repeat calls for so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """One run of a queue."""

    ledger: Ledger
    opened_by: str
    """The role of whoever opened it; empty where nobody was asked."""
    epoch: int
    """0: no trainer has acquired it."""
    committed_step: int
    """Optimizer steps of the newest checkpoint."""
    feed_closed: bool
    dead_letters: int
    """Those that are kept, with their tasks."""
    attached: tuple[str, ...]
    """Signs that services work on it, a sentence each; none: it is over, or abandoned."""

    @property
    def run(self) -> str:
        """Its name."""
        return self.ledger.run

    @property
    def loss(self) -> str:
        """The loss with it, in words."""
        rows = sum(self.ledger.resident.values())
        letters = counted(self.dead_letters, "dead letter")
        return f"{counted(rows, 'resident row')}, {letters} and the feeder's position"


def describe(run: Run, waits: list[Wait], called_s: float | None) -> StoredRun:
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


def delete(run: Run, commit_log: CommitLog) -> None:
    """Stage the deletion of everything that is stored of a run which the queue does not have any more."""
    for key in run.record_keys():
        commit_log.delete(Table.META, key)
    for key in run.needed_payload():
        commit_log.delete(Table.PAYLOAD, key)
    run.end_leases()
    run.notify_all()
