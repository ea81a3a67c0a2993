"""One run in RAM: its groups, the sets they are ready in, its books; and the primitive moves of a row.

Everything here is synchronous: a transition happens between two awaits, stages its records in the journal and rings
the bells of whoever may go on. The verbs (lease, write, take, settle …) are in leases.py and batches.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from meshrl.contract.errors import FencedError
from meshrl.contract.nouns import (
    Json,
    RunSpec,
    RunState,
    Uid,
    Version,
)
from meshrl.transferqueue import sampling
from meshrl.transferqueue.batches import TakenBatch
from meshrl.transferqueue.dead import DeadRow
from meshrl.transferqueue.frames import seal_json
from meshrl.transferqueue.journal import Journal
from meshrl.transferqueue.ledger import Books, Exit, State
from meshrl.transferqueue.ordered import OrderedNumbers
from meshrl.transferqueue.ready import ReadyRows
from meshrl.transferqueue.rows import Group, Row, facts_of
from meshrl.transferqueue.stages import Stages
from meshrl.transferqueue.store import Table
from meshrl.transferqueue.waiting import Bell, Expiry


class Run:
    """The state of one run."""

    def __init__(
        self,
        spec: RunSpec,
        number: int,
        *,
        journal: Journal,
        expiry: Expiry,
        clock: Callable[[], float],
    ) -> None:
        self.spec = spec
        self.name = spec.run
        self.number = number
        self.stages = Stages(spec.stages)
        self.journal = journal
        self.expiry = expiry
        self.clock = clock

        self.epoch = 0
        self.owner = ""
        self.published = Version(0, 0)
        self.cursor = ""
        self.feed_closed = False
        self.committed_step = 0
        self.last_token = 0
        self.next_group = 0
        self.next_position = 0
        self.next_batch = 0
        self.next_dead = 0

        self.groups: dict[int, Group] = {}
        self.by_task: dict[str, Group] = {}
        self.seen: set[str] = set()
        self.batches: dict[str, TakenBatch] = {}
        self.dead: dict[Uid, DeadRow] = {}
        self.dead_of: dict[int, list[DeadRow]] = {}
        """Dead letters by group number: they keep the task of a group that left."""
        self.books = Books()

        self.ready = tuple(ReadyRows() for _ in self.stages)
        self.sampler = sampling.build(spec.sampler)
        self.replay = OrderedNumbers()
        """Complete groups that were taken before, by position: to be taken again first, and in that order."""
        self.complete = 0
        """Groups that could be taken now."""
        self.in_batches = 0
        """Groups in a batch, taken or settled."""
        self.consumed = 0
        """Groups whose batch gives no credit back any more: see admission.py."""
        self.open_bytes = 0
        """Payload of the groups that are not consumed."""

        self.publishes = 0
        """Calls of `publish` since the queue opened: tells a waiting lease that its engine's version is old news."""
        self.rows_bell = tuple(Bell() for _ in self.stages)
        self.complete_bell = Bell()
        self.room_bell = Bell()

    # --- what is stored of the run itself

    @property
    def key(self) -> bytes:
        """Of the record that every transition rewrites."""
        return b"s" + self.number.to_bytes(4, "big")

    @property
    def spec_key(self) -> bytes:
        """Of the record that never changes."""
        return b"r" + self.number.to_bytes(4, "big")

    def encode(self) -> bytes:
        """Counters and position, with the books: they change in the transaction of the rows."""
        return seal_json(
            {
                "epoch": self.epoch,
                "owner": self.owner,
                "published": str(self.published),
                "cursor": self.cursor,
                "feed_closed": self.feed_closed,
                "committed_step": self.committed_step,
                "last_token": self.last_token,
                "next_group": self.next_group,
                "next_position": self.next_position,
                "next_batch": self.next_batch,
                "next_dead": self.next_dead,
                "books": self.books.totals(),
            }
        )

    def decode(self, stored: Json) -> None:
        """The inverse of `encode`, but for the books, which need the rows."""
        fields = dict(stored)
        del fields["books"]
        self.published = Version.parse(fields.pop("published"))
        for name, value in fields.items():
            setattr(self, name, value)

    def state(self) -> RunState:
        """What the port tells of the run."""
        return RunState(
            spec=self.spec,
            epoch=self.epoch,
            published=self.published,
            cursor=self.cursor,
            feed_closed=self.feed_closed,
            committed_step=self.committed_step,
        )

    def save(self, groups: Iterable[Group] = ()) -> None:
        """Stage the run's record and those of `groups` that are still here."""
        self.journal.touch(self)
        for group in groups:
            if self.groups.get(group.number) is group:
                self.journal.touch(group)

    def check_epoch(self, epoch: int) -> None:
        """Refuse a trainer that lost the run. Raises FencedError."""
        if epoch != self.epoch:
            raise FencedError(
                f"run {self.name}: epoch {epoch} is fenced, epoch {self.epoch} has the run"
                f" ({self.owner or 'nobody acquired it'})",
                epoch=epoch,
                newest=self.epoch,
            )

    # --- bells

    def ring_stages(self) -> None:
        """Something changed that every lease may wait for."""
        for bell in self.rows_bell:
            bell.ring()

    def ring_all(self) -> None:
        """Everybody looks again."""
        self.ring_stages()
        self.complete_bell.ring()
        self.room_bell.ring()

    # --- moves of one row

    def find(self, uid: Uid) -> Row | None:
        """The resident row of exactly this attempt."""
        group = self.by_task.get(uid.task)
        row = group.rows.get(uid.index) if group else None
        return row if row is not None and row.attempt == uid.attempt else None

    def add_group(self, group: Group) -> None:
        """A group with a fresh row at every index comes in (or comes in again)."""
        self.groups[group.number] = group
        self.by_task[group.task_id] = group
        self.open_bytes += group.task_bytes
        for index in range(group.size):
            self.add_row(group, index)

    def add_row(self, group: Group, index: int) -> Row:
        """The attempt of `group.attempts[index]` comes in."""
        row = group.fresh_row(index, len(self.stages), self.clock())
        self.books.admit(1)
        self.refresh(row)
        return row

    def state_of(self, row: Row) -> State:
        """Derived from what is stored; `row.state` caches it for the books."""
        batch = row.group.batch
        if batch is not None:
            return State.SETTLED if batch.settled else State.TAKEN
        if row.done == self.stages.all_done:
            return State.READY
        if row.done:
            return State.PENDING
        return State.LEASED if row.held else State.QUEUED

    def refresh(self, row: Row) -> None:
        """Bring the books and the ready sets in line with the row."""
        state = self.state_of(row)
        if state is not row.state:
            self.books.move(row.state, state)
            row.state = state
        for stage in self.stages:
            ready = self.ready[stage.number]
            if (
                row.group.batch is None
                and row.done & (stage.needs | stage.bit) == stage.needs
                and stage.number not in row.held
            ):
                ready.add(row)
                self.rows_bell[stage.number].ring()
            else:
                ready.discard(row)

    def remove_row(self, row: Row, exit_: Exit, reason: str) -> None:
        """The row leaves; its payload goes, whoever holds it is fenced."""
        group = row.group
        self.books.leave(row.state, exit_, reason)
        row.held.clear()
        for stage in self.stages:
            self.ready[stage.number].discard(row)
            if row.done & stage.bit:
                self.journal.delete(Table.PAYLOAD, row.frame_key(stage.number))
        group.ready -= row.done == self.stages.all_done
        if not (group.batch and group.batch.consumed):
            self.open_bytes -= row.nbytes
        del group.rows[row.index]

    def remove_group(self, group: Group, exit_: Exit, reason: str) -> None:
        """Every row that is left leaves, and the group with them."""
        for row in list(group.rows.values()):
            self.remove_row(row, exit_, reason)
        self.withdraw(group)
        batch = group.batch
        if batch is not None:
            del batch.groups[group.number]
            self.in_batches -= 1
        if batch is not None and batch.consumed:
            self.consumed -= 1
        else:
            self.open_bytes -= group.task_bytes
        del self.groups[group.number]
        del self.by_task[group.task_id]
        self.journal.delete(Table.META, group.key)
        dead = self.dead_of.get(group.number, [])
        for letter in dead:
            letter.attempts = list(group.attempts)
            self.journal.touch(letter)
        if not dead:
            self.journal.delete(Table.PAYLOAD, group.task_key)
        self.ring_all()

    # --- completeness

    def offer(self, group: Group) -> None:
        """The group is complete: to be taken, where its place is."""
        group.complete = True
        self.complete += 1
        if group.position >= 0:
            self.replay.add(group.number, (group.position,))
        else:
            facts = list(facts_of(row for row in group.ordered() if self.finished(row)))
            self.sampler.add(
                sampling.CompleteGroup(
                    number=group.number,
                    task_id=group.task_id,
                    priority=group.priority,
                    num_tokens=tuple(fact.num_tokens for fact in facts),
                    oldest=min(fact.oldest for fact in facts),
                    newest=max(fact.newest for fact in facts),
                )
            )
        self.complete_bell.ring()

    def withdraw(self, group: Group) -> None:
        """The group is not to be taken (any more)."""
        if group.complete:
            group.complete = False
            self.complete -= 1
            self.sampler.discard(group.number)
            self.replay.discard(group.number)

    def finished(self, row: Row) -> bool:
        """True when the row has every column."""
        return row.done == self.stages.all_done
