"""A transfer queue that can be one of several: it says what it could hand out, and takes groups by plan.

    batch id on a shard:  <batch id>#<round>/<shard>:<groups>.<shard>:<groups>. ... !<step>

The plan of a batch says how many groups each shard gives, and in which order they stand. A step behind `!` says that
groups which are sampled from it or earlier on come first, since the next batch would get some of them too late. The
plan is part of the id under which a shard records its groups of a batch, in the same transaction and under the
trainer's epoch. Shard 0 records it before any other shard, even where it gives no group, and records one plan for a
batch. So all callers that ask for a batch at the same time follow the same plan, and a caller that asks again finds
it, whatever died in between.

A round is a number that grows from batch to batch, the same on all shards. A group keeps the round in which it was
first taken in its position, so that shards agree on the order in which groups come again after a rewind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from typing import Self, TypeVar, Unpack

from meshrl.contract.errors import (
    ConflictError,
    EndOfDataError,
    FencedError,
    UserError,
    WaitTimeoutError,
)
from meshrl.contract.types import Batch, RunSpec, RunState, Task, Version
from meshrl.transferqueue.model.records import TakenBatch
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.model.signals import Signal, any_signal
from meshrl.transferqueue.model.stages import Stage
from meshrl.transferqueue.operations import leases, lifecycle, window
from meshrl.transferqueue.queue import QueueOptions, TransferQueue
from meshrl.transferqueue.sharding.port import GroupCounts, RowCounts, ShardCapacity, ShardNote
from meshrl.transferqueue.sharding.run_shards import SUFFIX
from meshrl.transferqueue.store import Store

ROUND_BITS = 24
"""A position is `round << ROUND_BITS` and a number."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One batch, spread over shards."""

    round: int
    runs: tuple[tuple[int, int], ...]
    """(shard, groups): that many groups of that shard are next. A shard may stand here several times."""
    due_by: int = -1
    """Groups that are sampled from this step or earlier on come first; negative: none do."""

    @classmethod
    def of(cls, round_: int, runs: Sequence[tuple[int, int]], due_by: int = -1) -> Self:
        """Joins neighbouring runs of one shard and leaves out empty ones."""
        joined = groupby((run for run in runs if run[1]), key=lambda run: run[0])
        parts = tuple((shard, sum(n for _, n in part)) for shard, part in joined)
        return cls(round_, parts, due_by)

    @property
    def shares(self) -> dict[int, int]:
        """Groups by shard: of shard 0, and of every other shard that gives any."""
        shares = {0: 0}
        for shard, groups in self.runs:
            shares[shard] = shares.get(shard, 0) + groups
        return shares

    def in_order(self, parts: Mapping[int, Sequence[Item]]) -> tuple[Item, ...]:
        """What each shard gave, in the order of the batch: less than planned where rows were damaged."""
        parts_left = {shard: iter(part) for shard, part in parts.items()}
        return tuple(
            item for shard, groups in self.runs for item in islice(parts_left[shard], groups)
        )

    def name(self, batch_id: str) -> str:
        """The id of the batch on a shard."""
        return f"{batch_id}#{self}"

    def __str__(self) -> str:
        text = f"{self.round}/" + ".".join(f"{shard}:{groups}" for shard, groups in self.runs)
        return text if self.due_by < 0 else f"{text}!{self.due_by}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`. Raises ValueError."""
        round_, _, rest = text.partition("/")
        runs, mark, due_by = rest.partition("!")
        pairs = [run.split(":") for run in runs.split(".")]
        parts = tuple((int(shard), int(groups)) for shard, groups in pairs)
        return cls(int(round_), parts, int(due_by) if mark else -1)


def parse_batch_name(name: str) -> tuple[str, BatchPlan | None]:
    """The batch id and the plan in the id of a batch on a shard; no plan where no router made the id."""
    batch_id, mark, text = name.rpartition("#")
    if not mark:
        return name, None
    try:
        return batch_id, BatchPlan.parse(text)
    except ValueError:
        return name, None


class ShardQueue(TransferQueue):
    """A Queue and a Shard. By itself it is a TransferQueue like any other."""

    def __init__(self, store: Store, **options: Unpack[QueueOptions]) -> None:
        super().__init__(store, **options)
        self._turns: dict[str, str] = {}
        """Whose turn it is to admit, by run. In RAM: after a restart nobody has the turn, and feeders begin again."""
        self._turn_over = Signal()
        self._written = Signal()

    async def note(
        self, name: str, *, other_than: str | None = None, wait_s: float = 0.0
    ) -> ShardNote:
        """See the port. A note is the cursor of a run that never has a task."""
        deadline = self._deadline(wait_s)
        while True:
            self._check_open()
            text = self._text(name)
            if text != other_than:
                break
            await any_signal(
                [self._written, self._runs_signal], deadline, lambda: f"another text of {name}"
            )
        await self._commit_log.flush()
        return ShardNote(
            text=text, runs=tuple(run for run in self._runs if not run.endswith(SUFFIX))
        )

    async def write_note(self, name: str, text: str, *, instead_of: str) -> None:
        """See the port."""
        if not name.endswith(SUFFIX):
            raise UserError(f"a note's name ends with {SUFFIX}: {name!r}")
        if name not in self._runs:
            await self.open_run(RunSpec(run=name, group_size=1, batch_groups=1, max_staleness=0))
        # Nothing is awaited between this look and the transition.
        if (written := self._text(name)) not in (text, instead_of):
            raise ConflictError(f"{name} has become {written!r}, it is no longer {instead_of!r}")
        run = self._run(name)
        if written != text:
            run.move_cursor(text)
            run.save()
            self._written.notify()
        await self._commit_log.flush()

    def _text(self, name: str) -> str:
        run = self._runs.get(name)
        return run.record.cursor if run else ""

    async def follow(self, state: RunState, owner: str) -> None:
        """See the port."""
        run = self._run(state.spec.run)
        if state.epoch < run.record.epoch:
            run.check_epoch(state.epoch)
        if state.epoch > run.record.epoch:
            run.begin_epoch(state.epoch, owner)
        if state.published > run.record.published:
            run.publish(state.published)
        lifecycle.commit(run, state.committed_step)
        if state.feed_closed:
            run.close_feed()
        run.save()
        run.notify_all()
        await self._commit_log.flush()

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
        """See the port."""
        if fewer_than >= 0:
            await self._until(
                lambda: self._has_capacity(run, fewer_than),
                lambda: [self._run(run).admission_signal],
                ("admit", (run,), "feeder", why),
                wait_s,
            )
        elif turn:
            await self._until_turn(run, wait_s)
        state = self._run(run)
        if turn:
            self._turns[run] = turn
        answer = ShardCapacity(
            open_groups=state.unconsumed,
            open_bytes=state.open_bytes,
            feed_closed=state.record.feed_closed,
            known=frozenset(task for task in tasks if task in state.known_tasks),
            members=self._text(run + SUFFIX),
        )
        # A task that was reported as known must stay known.
        await self._commit_log.flush()
        return answer

    async def _until_turn(self, run: str, wait_s: float) -> None:
        """Return once nobody has the turn, or after `wait_s`."""
        wait = ("admit", (run,), "feeder", "the turn of another feeder to end")
        with suppress(WaitTimeoutError):
            await self._until(
                lambda: run not in self._turns, lambda: [self._turn_over], wait, wait_s
            )

    def _has_capacity(self, run: str, fewer_than: int) -> bool:
        state = self._run(run)
        return state.record.feed_closed or state.unconsumed < fewer_than

    async def admit_in_turn(
        self, run: str, tasks: Sequence[Task], *, cursor: str | None, turn: str
    ) -> int:
        """See the port."""
        if self._turns.get(run) != turn:
            raise FencedError(f"run {run}: another feeder has begun to admit", turn=turn)
        try:
            if cursor is None:
                if not tasks:
                    return 0
                cursor = self._run(run).record.cursor
            # Nothing is awaited between this check and the transition.
            return await self.admit(run, tasks, cursor=cursor, wait_s=0.0)
        except WaitTimeoutError:
            return 0
        finally:
            if self._turns.get(run) == turn:
                del self._turns[run]
                self._turn_over.notify()

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
        """See the port."""
        found: list[GroupCounts] = []

        def look() -> bool:
            state = self._run(run)
            state.check_epoch(epoch)
            now = _groups(state, step, groups, _plan(state, batch_id), self._text(run + SUFFIX))
            found[:] = [now]
            return (
                now.complete > more_than
                or now.done is not done
                or (due_by >= 0 and window.unfinished(now.sampled, due_by) != unfinished)
            )

        who = f"trainer of epoch {epoch}, batch {batch_id}"
        await self._until(
            look,
            lambda: [self._run(run).complete_signal],
            ("take", (run,), who, why),
            wait_s,
            due_by=due_by,
        )
        await self._commit_log.flush()
        return found[0]

    async def plan_of(self, run: str, batch_id: str) -> str:
        """See the port."""
        plan = _plan(self._run(run), batch_id)
        await self._commit_log.flush()
        return plan

    async def take(
        self, run: str, *, epoch: int, step: int, groups: int, batch_id: str, wait_s: float
    ) -> Batch:
        """See Queue. What a round takes first stands behind everything that earlier rounds took first.

        A batch's share may be empty. Raises ConflictError, with `plan`, where another one is recorded for it.
        """
        name, plan = parse_batch_name(batch_id)
        if plan is None:
            return await super().take(
                run, epoch=epoch, step=step, groups=groups, batch_id=batch_id, wait_s=wait_s
            )
        state = self._run(run)
        state.check_epoch(epoch)
        recorded = _plan(state, name)
        if recorded not in ("", str(plan)):
            raise ConflictError(
                f"batch {name} is taken under plan {recorded}, not {plan}", plan=recorded
            )
        state.skip_positions(plan.round << ROUND_BITS)
        try:
            return await self._take(run, epoch, step, groups, batch_id, wait_s, due_by=plan.due_by)
        except EndOfDataError:  # the share was damaged: the other shards give theirs
            return await self._take(run, epoch, step, 0, batch_id, wait_s)

    def _in_hand(self, run: Run) -> Sequence[TakenBatch]:
        """Not the shares of batches that several shards give: no shard knows the whole batch."""
        found = super()._in_hand(run)
        return [batch for batch in found if parse_batch_name(batch.batch_id)[1] is None]

    async def publish_and_tell(self, run: str, version: Version) -> str:
        """See the port."""
        await self.publish(run, version)
        return self._text(run + SUFFIX)

    async def commit_and_tell(self, run: str, *, epoch: int, step: int) -> str:
        """See the port."""
        await self.commit(run, epoch=epoch, step=step)
        return self._text(run + SUFFIX)

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
        """See the port."""
        seen = {name: run.publishes for name in runs if (run := self._runs.get(name))}

        def look() -> bool:
            self._check_open()
            for run, spec in leases.leasable(self._runs, runs, stage):
                if leases.open_to(run, spec, version):
                    if leases.enough(run, spec, 1) and leases.share(run, spec, worker, limit, 1):
                        return True
                elif run.publishes != seen.setdefault(run.name, run.publishes):
                    raise WaitTimeoutError(
                        f"version {version} is too old for run {run.name} at {run.record.published}:"
                        " ask again with the engine's version"
                    )
            return False

        at = f" at version {version}" if version else ""
        why = f"1 rows of stage {stage}{at}"
        signals = partial(self._signals, runs, stage, worker, at_least=1)
        with leases.waiting(leases.leasable(self._runs, runs, stage), worker):
            await self._until(look, signals, ("lease", tuple(runs), worker, why), wait_s)

    def _signals(
        self, runs: Sequence[str], stage: str, worker: str, *, at_least: int
    ) -> list[Signal]:
        """Signals of a change in what a stage may lease."""
        candidates = leases.leasable(self._runs, runs, stage)
        return [*leases.signals(candidates, worker, at_least), self._runs_signal]

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
        """See the port."""
        found: list[RowCounts] = []

        def look() -> bool:
            self._check_open()
            found[:] = [_rows(run, spec) for run, spec in leases.leasable(self._runs, runs, stage)]
            return unlike is None or found != list(unlike)

        signals = partial(self._signals, runs, stage, worker, at_least=2)
        await self._until(look, signals, ("lease", tuple(runs), worker, why), wait_s)
        return found

    async def _until(
        self,
        true: Callable[[], bool],
        signals: Callable[[], Sequence[Signal]],
        wait: tuple[str, tuple[str, ...], str, str],
        wait_s: float,
        *,
        due_by: int = -1,
    ) -> None:
        """Return once `true()`; checks again at every signal. Raises WaitTimeoutError."""
        if true():
            return
        kind, runs, who, why = wait
        deadline = self._deadline(wait_s)
        with self._waits.tracked(kind, runs, who, lambda: why, lambda: due_by):
            while not true():
                await any_signal(signals(), deadline, lambda: why)


def _plan(run: Run, batch_id: str) -> str:
    found = (plan for name, plan in map(parse_batch_name, run.batches) if plan and name == batch_id)
    return str(next(found, ""))


def _groups(run: Run, step: int, count: int, plan: str, members: str) -> GroupCounts:
    """Look at the next groups of a take; those that grew too old leave on the way, as in `take`."""
    found = [] if plan else lifecycle.fresh_enough(run, step, count)
    replays = Counter(group.position >> ROUND_BITS for group in found if group.position >= 0)
    return GroupCounts(
        plan=plan,
        replays=tuple(sorted(replays.items())),
        fresh=len(found) - replays.total(),
        unfinished=len(run.groups) - run.in_batches - len(run.complete),
        feed_closed=run.record.feed_closed,
        next_round=(run.record.next_position >> ROUND_BITS) + 1,
        sampled=lifecycle.sampled(run, step),
        waits_for_due=lifecycle.waits_for_due(run),
        members=members,
    )


def _rows(run: Run, stage: Stage) -> RowCounts:
    return RowCounts(
        run=run.name,
        ready=run.num_ready(stage),
        upstream=0 if stage.first else run.ledger.unstarted,
        open_groups=run.unconsumed,
        open_bytes=run.open_bytes,
        feed_closed=run.record.feed_closed,
        epoch=run.record.epoch,
        published=run.record.published,
    )
