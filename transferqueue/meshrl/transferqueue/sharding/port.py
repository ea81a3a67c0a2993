"""The Shard port: a queue that also says, without handing anything out, what it could hand out.

The router decides by these figures and then acts through the Queue port with no wait. Reading figures changes nothing
that anybody could miss, so such a call may be cancelled at any moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from meshrl.contract.ports import Queue
from meshrl.contract.types import RunState, Task, Version
from meshrl.transferqueue.operations.window import Sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCapacity:
    """How full a run is on one shard; for admission."""

    open_groups: int
    """Admitted and not consumed (see admission.py)."""
    open_bytes: int
    """Payload of these groups."""
    feed_closed: bool
    known: frozenset[str]
    """Those of the tasks in question that were ever admitted here."""
    members: str = ""
    """The note on which shards the run is (run_shards.py); on shard 0 only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardNote:
    """A text on a shard that is not a row: which shards there are (shard_list.py, run_shards.py)."""

    text: str
    """Empty where nothing is written."""
    runs: tuple[str, ...]
    """The runs that are open here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """How many groups of a run one shard could give; for `take`."""

    plan: str
    """The plan of the batch in question, if any of its groups were taken here; else empty."""
    replays: tuple[tuple[int, int], ...]
    """(round, groups): complete groups that were taken before, by the round that first took them, in order."""
    fresh: int
    """Complete groups that were never taken; counted together with the replays up to the number asked for."""
    unfinished: int
    """Groups that are in no batch and not complete."""
    feed_closed: bool
    next_round: int
    """Later than any round of the run here."""
    sampled: tuple[Sampled, ...] = ()
    """The groups in no batch by the version from which they are sampled, where staleness is bounded."""
    waits_for_due: bool = False
    """Whether the run waits for a group that the next batch would get too late."""
    members: str = ""
    """As in ShardCapacity."""

    @property
    def complete(self) -> int:
        """Groups that a take would get now."""
        return self.fresh + sum(groups for _, groups in self.replays)

    @property
    def done(self) -> bool:
        """True when no more groups can become complete."""
        return self.feed_closed and self.unfinished == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """How many rows of one run one shard could lease; for leases of a fixed number of rows."""

    run: str
    ready: int
    """Rows that the stage could lease now."""
    upstream: int
    """Rows without any column: they may still come to a later stage."""
    open_groups: int
    open_bytes: int
    feed_closed: bool
    epoch: int
    published: Version


class Shard(Queue, Protocol):
    """One of several queues behind a router."""

    async def note(
        self, name: str, *, other_than: str | None = None, wait_s: float = 0.0
    ) -> ShardNote:
        """What is written under `name`. With `other_than` the answer waits until it is another text.

        Raises WaitTimeoutError.
        """
        ...

    async def write_note(self, name: str, text: str, *, instead_of: str) -> None:
        """Write `text`; writing it twice is writing it once.

        Raises ConflictError when something else than `instead_of` is written by then.
        """
        ...

    async def follow(self, state: RunState, owner: str) -> None:
        """Bring the run's epoch, published version, committed step and closed feed up to `state`; idempotent.

        A newer epoch is what `acquire` makes it. Raises FencedError when the run has a newer one here.
        """
        ...

    async def capacity(
        self,
        run: str,
        *,
        turn: str = "",
        tasks: Sequence[str] = (),
        fewer_than: int = -1,
        why: str = "",
        wait_s: float = 0.0,
    ) -> ShardCapacity:
        """How full the run is, and which of `tasks` it knows. A `turn` begins: earlier turns may admit no more.

        With `fewer_than` the answer waits until fewer groups are open (or the feed is closed); `why` is what
        `why_waiting` says meanwhile. Raises WaitTimeoutError. Without it, a turn waits for the one before it to be
        over, and begins after `wait_s` all the same.
        """
        ...

    async def admit_in_turn(
        self, run: str, tasks: Sequence[Task], *, cursor: str | None, turn: str
    ) -> int:
        """`admit` without a wait, which ends the turn here; 0 where there is no capacity. With None the cursor stays.

        Raises FencedError when another turn has begun.
        """
        ...

    async def groups(
        self,
        run: str,
        *,
        epoch: int,
        step: int,
        batch_id: str,
        groups: int,
        more_than: int = -1,
        done: bool = False,
        due_by: int = -1,
        unfinished: int = 0,
        why: str = "",
        wait_s: float = 0.0,
    ) -> GroupCounts:
        """Which of the next `groups` groups a take for `step` would get. Groups grown too old leave as stale.

        Waits until more than `more_than` are complete, or `GroupCounts.done` is no longer `done`, or, with `due_by`,
        until others than `unfinished` groups that are sampled from that step or earlier on are not complete.
        Raises FencedError, WaitTimeoutError.
        """
        ...

    async def plan_of(self, run: str, batch_id: str) -> str:
        """The plan under which groups of the batch were taken here; empty when none were."""
        ...

    async def publish_and_tell(self, run: str, version: Version) -> str:
        """`publish`; then returns, from shard 0, the note of the run's shards (run_shards.py)."""
        ...

    async def commit_and_tell(self, run: str, *, epoch: int, step: int) -> str:
        """`commit`; then the note, as in `publish_and_tell`."""
        ...

    async def until_rows(
        self,
        runs: Sequence[str],
        stage: str,
        *,
        worker: str,
        limit: int,
        version: Version | None = None,
        wait_s: float,
    ) -> None:
        """Return once `lease` would give a row; raises whatever it would raise. Nothing is granted."""
        ...

    async def rows(
        self,
        runs: Sequence[str],
        stage: str,
        *,
        worker: str,
        unlike: Sequence[RowCounts] | None = None,
        why: str = "",
        wait_s: float = 0.0,
    ) -> Sequence[RowCounts]:
        """Figures of those of `runs` that are open and have the stage, highest priority first.

        With `unlike` the answer waits until it differs. Raises UserError, EndOfDataError (as `lease`),
        WaitTimeoutError.
        """
        ...
