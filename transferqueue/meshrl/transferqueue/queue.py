"""The transfer queue: implements the port `Queue` of contract/ports.py in this process.

    feeder ─admit─▶ ┌────────────────────── TransferQueue ──────────────────────┐ ─take─▶ trainer
    worker ─lease─▶ │ runs in RAM ── transitions ──▶ commit log ── commits ──▶ store │ ─fetch─▶
           ─write─▶ └────────────────────────────────────────────────────────────┘

Each method checks its arguments, makes one synchronous transition in RAM, and returns when the commit log has made it
durable. A wait is a signal and a deadline; nothing polls. README.md draws the life of a row.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self, TypedDict, Unpack

from typing_extensions import override

from meshrl.common.plain_text import counted
from meshrl.contract.errors import (
    CapacityError,
    ConflictError,
    CorruptError,
    FencedError,
    NotFoundError,
    UnavailableError,
    UserError,
    WaitTimeoutError,
)
from meshrl.contract.held_rows import HeldLeases, renewing
from meshrl.contract.ports import HeartbeatQueue, Reserve, every_stage, unbounded
from meshrl.contract.rows import DAMAGED, FAILED, UNTRAINABLE
from meshrl.contract.types import (
    MEDIA,
    Batch,
    DeadLetter,
    Lease,
    Ledger,
    Outcome,
    RowBlock,
    RunSpec,
    RunState,
    StoredRun,
    Task,
    Uid,
    Version,
    Waiting,
    name_fault,
)
from meshrl.transferqueue import sampling, why_waiting
from meshrl.transferqueue.model.batches import read_manifest
from meshrl.transferqueue.model.columns import Unread, wanted
from meshrl.transferqueue.model.group import Grant, task_key
from meshrl.transferqueue.model.groups import packed
from meshrl.transferqueue.model.leases import leasable, signals, waiting
from meshrl.transferqueue.model.records import TakenBatch
from meshrl.transferqueue.model.rows import Stage
from meshrl.transferqueue.model.run import Run, restore
from meshrl.transferqueue.model.specs import (
    Quota,
    check_opener,
    check_spec,
    encode_spec,
    joined_specs,
)
from meshrl.transferqueue.model.waiting import Expiry
from meshrl.transferqueue.payload import PayloadReader
from meshrl.transferqueue.signals import Signal, Waits, any_signal
from meshrl.transferqueue.store import (
    CACHE_BYTES,
    RECOVERY_PAUSE_S,
    CommitLog,
    Durations,
    RecentFrames,
    SpaceCheck,
    Store,
    Table,
    encode_record,
)

log = logging.getLogger(__name__)

WITH_PROMPT = 1000
"""Dead letters whose tasks are read when they are listed."""
MOST_REASON = 2000
"""Characters of a reason that a worker fails a row with: each row may keep one. The rest is cut off."""


class QueueOptions(TypedDict, total=False):
    """Options for opening a queue."""

    samplers: Collection[str]
    """Dotted paths that a run may name besides the known samplers."""
    quota: Quota
    """The most that a run may ask for."""
    cache_bytes: int
    """Frames that are kept in RAM as well; see RecentFrames."""
    recovery_pause_s: float
    """Pause between two attempts to read back a store that cannot be read."""


@dataclass(frozen=True, slots=True, eq=False)
class Heartbeat:
    """One stream by which a worker says that it lives."""

    began: float
    """Start, in seconds of the event loop's clock."""
    serves: Callable[[str], bool]
    """Whether the worker's leases of the stage of this name end with the stream."""


class TransferQueue(HeartbeatQueue):
    """One queue on one store: call `open`, and `close` at the end. It belongs to the event loop that opened it."""

    def __init__(self, store: Store, **options: Unpack[QueueOptions]) -> None:
        self._store = store
        self._samplers = options.get("samplers", ())
        self._quota = options.get("quota", Quota())
        self._runs: dict[str, Run] = {}
        frames = RecentFrames(options.get("cache_bytes", CACHE_BYTES))
        self._payload = PayloadReader(store, frames)
        recovery_pause_s = options.get("recovery_pause_s", RECOVERY_PAUSE_S)
        self._commit_log = CommitLog(
            store, self._recover, recovery_pause_s, on_committed=frames.committed
        )
        self._expiry = Expiry(self._expired)
        self._waits = Waits()
        self._space = SpaceCheck(store, asyncio.get_running_loop().time)
        self._attended: defaultdict[str, list[Heartbeat]] = defaultdict(list)
        """Per worker."""
        self._called: dict[str, float] = {}
        """When a service has worked on a run last, by the event loop's clock; of a run that is not open, too."""
        self._runs_signal = Signal()
        """A run was opened, or the queue closes."""
        self._committer: asyncio.Task[None] | None = None
        self._closing = False

    @classmethod
    async def open(cls, store: Store, **options: Unpack[QueueOptions]) -> Self:
        """Read the store back and serve it; from now on the queue owns the store.

        Raises:
            UserError: another process owns the store, or it has another format. CorruptError: it cannot be read.
        """
        queue = cls(store, **options)
        try:
            await queue._recover()
        except BaseException:
            await store.close()
            raise
        queue._committer = asyncio.create_task(queue._commit_log.run(), name="queue-commit-log")
        return queue

    async def close(self) -> None:
        """End every wait with UnavailableError, make everything durable, close the store; idempotent."""
        if self._closing:
            return
        self._closing = True
        self._runs_signal.notify()
        for run in self._runs.values():
            run.notify_all()
        self._commit_log.close()
        if self._committer is not None:
            await self._committer
        self._expiry.clear()
        await self._store.close()

    @property
    def runs(self) -> tuple[str, ...]:
        """The names of the runs that are open."""
        return tuple(self._runs)

    @property
    def open_runs(self) -> Sequence[Run]:
        """The runs, for metrics; do not keep references."""
        return tuple(self._runs.values())

    @property
    def commit_s(self) -> Durations:
        """Durations of the commits."""
        return self._commit_log.commit_s

    async def lost(self) -> UnavailableError:
        """Wait until the store is lost to this queue, which ends it: another queue has it, or its disk is broken."""
        return await asyncio.shield(self._commit_log.ended)

    # --- runs

    @override
    async def open_run(self, spec: RunSpec, *, caller: str = "") -> RunState:
        """Raises UserError for a spec that cannot work, CapacityError beyond the quota of `caller`."""
        self._check_open()
        run = self._runs.get(spec.run)
        if run is not None:
            run.complete_spec(joined_specs(run.spec, spec))
        else:
            check_spec(spec, self._quota)
            if len(self._runs) >= self._quota.runs:
                raise CapacityError(
                    f"this queue keeps {len(self._runs)} runs already: remove some that are"
                    " over with `meshrl runs remove`"
                )
            opened = sum(each.record.opened_by == caller for each in self._runs.values())
            check_opener(caller, opened, self._quota)
            number = max((r.number for r in self._runs.values()), default=-1) + 1
            run = self._make_run(spec, number)
            run.opened_by(caller)
            self._runs[spec.run] = run
            self._commit_log.put(Table.META, run.spec_key, encode_record(encode_spec(spec)))
            run.save()
            self._runs_signal.notify()
        self._worked(spec.run)
        await self._commit_log.flush()
        return run.state()

    def stored_runs(self) -> Sequence[StoredRun]:
        """All runs, as an operator sees them."""
        return [self._describe(run) for run in self._runs.values()]

    async def remove_run(self, run: str, *, force: bool = False) -> StoredRun:
        """Delete a run and all that is stored of it, in one commit; returns what it was.

        Waits for it end with NotFoundError, those of stages continue until a run of the name is opened.

        Raises:
            NotFoundError: no such run. ConflictError: services work on it, and it is not to be by `force`.
        """
        state = self._run(run)
        found = self._describe(state)
        if found.attached and not force:
            raise ConflictError(
                f"run {run} is worked on: {'; '.join(found.attached[:3])}. Stop its services, or use force"
            )
        del self._runs[run]
        self._called.pop(run, None)
        why_waiting.delete_run(state, self._commit_log)
        log.warning("run %s is removed, with %s", run, found.loss)
        await self._commit_log.flush()
        return found

    def _describe(self, run: Run) -> StoredRun:
        at = self._called.get(run.name)
        called_s = None if at is None else asyncio.get_running_loop().time() - at
        return why_waiting.stored_run(run, self._waits.of(run.name), called_s)

    @override
    async def run_state(self, run: str) -> RunState:
        state = self._run(run).state()
        await self._commit_log.flush()
        return state

    @override
    async def acquire(self, run: str, owner: str) -> RunState:
        _check_name("owner", owner)
        state = self._worked(run)
        state.acquire(owner)
        answer = state.state()
        await self._commit_log.flush()
        return answer

    @override
    async def publish(self, run: str, version: Version) -> None:
        """Publish a version; one older than the published one, of the same epoch, changes nothing."""
        state = self._worked(run)
        state.check_epoch(version.epoch)
        state.publish(version)
        await self._commit_log.flush()

    # --- the feeder

    @override
    async def admit(self, run: str, tasks: Sequence[Task], *, cursor: str, wait_s: float) -> int:
        """Raises UserError for a task that can never be processed, CapacityError for a full disk."""
        state = self._worked(run)
        most = self._quota.group_rows
        new = packed(state.spec, state.known_tasks, tasks, most_rows=most)
        if new:
            self._space.check(run, "feeder", sum(len(task.data) for task in new.values()))
        deadline = self._deadline(wait_s)

        def reason() -> str:
            return self._run(run).waits_for()

        with self._waits.tracked("admit", (run,), "feeder", reason):
            while True:
                state = self._run(run)
                count = state.admit(tasks, new, cursor)
                if count or not tasks:
                    for task in tasks[:count]:
                        data = new.get(task.task_id)
                        if data and (group := state.by_task.get(task.task_id)):
                            self._payload.remember(group.task_key, data)
                    await self._commit_log.flush()
                    return count
                await any_signal([state.admission_signal], deadline, reason)

    @override
    async def close_feed(self, run: str) -> None:
        state = self._worked(run)
        state.close_feed()
        await self._commit_log.flush()

    # --- stages

    @override
    async def lease(
        self,
        runs: Sequence[str],
        stage: str,
        *,
        worker: str,
        limit: int,
        at_least: int = 1,
        version: Version | None = None,
        wait_s: float,
        reserve: Reserve = unbounded,
    ) -> Lease:
        """Waits for runs that are not open yet.

        When a publish makes `version` too old, a waiting lease ends at once with WaitTimeoutError, so that the caller
        asks again with the version that its engine has by then.
        """
        if limit < 1 or not runs:
            raise UserError(f"a lease needs at least one row of at least one run, not {limit}")
        _check_name("worker", worker)
        limit = min(limit, self._quota.lease_rows)
        deadline = self._deadline(wait_s)
        seen = {name: run.publishes for name in runs if (run := self._runs.get(name))}

        def reason() -> str:
            at = f" at version {version}" if version else ""
            return f"{counted(min(limit, at_least), 'row')} of stage {stage}{at}"

        with self._waits.tracked("lease", runs, worker, reason):
            while True:
                self._check_open()
                candidates = leasable(self._runs, runs, stage)
                for run, spec in candidates:
                    if not run.open_to(spec, version):
                        if run.publishes != seen.setdefault(run.name, run.publishes):
                            raise WaitTimeoutError(
                                f"version {version} is too old for run {run.name} at"
                                f" {run.record.published}: ask again with the engine's version"
                            )
                    elif run.enough(spec, min(limit, at_least)):
                        share = run.share(spec, worker, limit, at_least)
                        if share:
                            lease = await self._grant(run, spec, worker, share, reserve)
                            if lease is not None:
                                return lease
                            break  # all that was granted is damaged: there may be more
                else:
                    wakers = signals(candidates, worker, min(limit, at_least))
                    with waiting(candidates, worker):
                        await any_signal([*wakers, self._runs_signal], deadline, reason)

    @override
    async def renew(self, run: str, stage: str, worker: str, uids: Sequence[Uid]) -> Sequence[Uid]:
        state = self._worked(run)
        return state.renew(state.stages[stage], worker, uids)

    @override
    async def renew_held(self, held_leases: HeldLeases) -> None:
        """Renew leases of a worker in this process; it shares the queue's event loop, so no thread is needed."""
        await renewing(self, held_leases)

    @contextmanager
    @override
    def heartbeat(
        self, worker: str, *, serves: Callable[[str], bool] = every_stage
    ) -> Iterator[None]:
        """If a successor of the same name has attended since, its grants are not affected."""
        clock = asyncio.get_running_loop().time
        this = Heartbeat(clock(), serves)
        self._attended[worker].append(this)
        try:
            yield
        finally:
            others = self._attended[worker]
            others.remove(this)
            later = (other.began for other in others if other.began > this.began)
            self._expiry.hasten(
                worker,
                min(later, default=clock()),
                lambda grant: serves(self._stage_of(grant)),
            )
            if not others:
                del self._attended[worker]

    def end_no_lease(self) -> None:
        """Let no lease expire from now on: the queue cannot receive renewals."""
        self._expiry.stop()

    @override
    async def write(self, run: str, stage: str, blocks: Sequence[RowBlock]) -> None:
        """Raises CapacityError for a full disk: nothing is written, the lease continues."""
        state = self._worked(run)
        spec = state.stages[stage]
        writes = state.check_write(spec, blocks)
        if writes:
            nbytes = sum(len(block.frame.value) for _, _, block in writes)
            self._space.check(run, f"stage {stage}", nbytes)
            state.write(spec, writes)
        await self._commit_log.flush()

    @override
    async def append(self, run: str, stage: str, blocks: Sequence[RowBlock]) -> None:
        """Raises CapacityError for a full disk: nothing is stored, the lease continues."""
        state = self._worked(run)
        spec = state.stages[stage]
        appends = state.check_append(spec, blocks)
        if appends:
            nbytes = sum(len(block.frame.value) for _, _, block in appends)
            self._space.check(run, f"progress of stage {stage}", nbytes)
            state.append(spec, appends)
        await self._commit_log.flush()

    @override
    async def redo(self, run: str, stage: str, uids: Sequence[Uid]) -> int:
        state = self._worked(run)
        rows = state.redo(state.stages[stage], uids)
        await self._commit_log.flush()
        return rows

    @override
    async def fail(
        self,
        run: str,
        stage: str,
        uid: Uid,
        token: int,
        outcome: Outcome,
        reason: str,
        lasting: bool = False,
    ) -> None:
        if len(reason) > MOST_REASON:
            reason = f"{reason[:MOST_REASON]}…"
        state = self._worked(run)
        state.fail(state.stages[stage], uid, token, outcome, reason, lasting=lasting)
        await self._commit_log.flush()

    @override
    async def release(self, run: str, stage: str, token_of: Mapping[Uid, int]) -> None:
        state = self._worked(run)
        state.release(state.stages[stage], token_of)
        await self._commit_log.flush()

    # --- the trainer

    @override
    async def take(
        self, run: str, *, epoch: int, step: int, groups: int, batch_id: str, wait_s: float
    ) -> Batch:
        if groups < 1 or not batch_id:
            raise UserError(f"take needs at least one group and a batch_id, not {groups} groups")
        deadline = self._deadline(wait_s)

        def reason() -> str:
            return why_waiting.take_reason(self._run(run), groups, step)

        def lacking_by() -> int:
            return why_waiting.take_due(self._run(run), groups, step)[0]

        who = f"trainer of epoch {epoch}, batch {batch_id}"
        with self._waits.tracked("take", (run,), who, reason, lacking_by):
            first = self._worked(run)
            first.wait_for_batch(batch_id)
            dead = first.record.next_dead
            while True:
                state = self._worked(run)
                state.check_epoch(epoch)
                batch = None
                if batch_id not in state.batches:
                    batch = state.take(epoch=epoch, step=step, count=groups, batch_id=batch_id)
                taken = state.batches.get(batch_id)
                if taken is None:
                    state.refuse_hopeless()
                    if state.record.next_dead > dead and state.lacks_groups(groups):
                        raise WaitTimeoutError(
                            f"rows have died: run {run} has fewer than {groups} groups"
                        )
                    await any_signal([state.complete_signal], deadline, reason)
                elif await self._sound(state, taken):
                    return batch or await self._taken_before(run, taken, step)

    @override
    async def fetch(
        self,
        run: str,
        blocks: Sequence[RowBlock],
        columns: Sequence[str],
        *,
        reserve: Reserve = unbounded,
    ) -> Sequence[RowBlock]:
        """Arrays are read-only. Raises UserError for a column that no stage writes."""
        state = self._worked(run)
        with_media = MEDIA in columns
        if with_media:
            columns = [name for name in columns if name != MEDIA]
        stages = state.stages.of_columns(columns)
        unread: list[Unread] = []
        for rows in blocks:
            group, mask = state.resident(rows)
            unread.append(wanted(group, rows, mask, stages, columns, with_task=with_media))
        reserve(sum(each.nbytes for each in unread))
        await self._commit_log.flush()
        try:
            found = await self._payload.read(unread, columns, state.stages.writes)
            return await self._payload.with_media(unread, found) if with_media else found
        except NotFoundError:
            for rows in blocks:
                if fault := self._lost(state, rows):
                    raise CorruptError(fault, task=rows.task) from None
            raise

    @override
    async def filter(self, run: str, *, epoch: int, uids: Sequence[Uid], reason: str) -> None:
        state = self._worked(run)
        state.check_epoch(epoch)
        if reason.startswith((DAMAGED, UNTRAINABLE)):
            log.error("run %s: rows become dead letters: %s", run, reason)
            state.quarantine_unread(uids, reason)
        elif reason.startswith(FAILED):
            log.error("run %s: task %s alone: %s", run, uids[0].task if uids else "", reason)
            state.fail_batch(uids, reason)
        else:
            state.filter(uids, reason)
        await self._commit_log.flush()

    @override
    async def settle(self, run: str, *, epoch: int, step: int, batch_id: str) -> None:
        """Raises NotFoundError, ConflictError (taken for another step), FencedError."""
        state = self._worked(run)
        state.check_epoch(epoch)
        state.settle(step=step, batch_id=batch_id)
        await self._commit_log.flush()

    @override
    async def commit(self, run: str, *, epoch: int, step: int) -> None:
        """Raises FencedError."""
        state = self._worked(run)
        state.check_epoch(epoch)
        state.commit(step)
        await self._commit_log.flush()

    @override
    async def rewind(self, run: str, *, epoch: int, step: int) -> int:
        """Raises FencedError, and ConflictError when rows of that step were committed."""
        state = self._worked(run)
        state.check_epoch(epoch)
        rows = state.rewind(step)
        await self._commit_log.flush()
        return rows

    # --- the ledger and dead letters

    @override
    async def ledger(self, run: str) -> Ledger:
        """Returns when everything that the ledger counts is durable."""
        ledger = self._run(run).ledger.snapshot(run)
        await self._commit_log.flush()
        return ledger

    @override
    async def dead_letters(self, run: str) -> Sequence[DeadLetter]:
        """The run's dead letters, in the order in which the rows died."""
        rows = list(self._run(run).dead_letters.values())
        await self._commit_log.flush()
        keys = [task_key(row.run_number, row.group) for row in rows]
        prompts = await self._payload.prompts(list(dict.fromkeys(keys[-WITH_PROMPT:])))
        return [
            replace(row.letter, prompt=prompts.get(key, ""))
            for row, key in zip(rows, keys, strict=True)
        ]

    @override
    async def replay(self, run: str, uids: Sequence[Uid]) -> int:
        """If a group has left, its whole task comes in again."""
        count = self._run(run).replay(uids)
        await self._commit_log.flush()
        return count

    @override
    async def why_waiting(self, run: str) -> Sequence[Waiting]:
        entries = why_waiting.why_waiting(self._run(run), self._waits.of(run))
        return [*self._commit_log.waiting(), *self._space.waiting(run), *entries]

    # --- inside

    def _check_open(self) -> None:
        if self._closing:
            raise UnavailableError("the queue is closing")

    def _run(self, name: str) -> Run:
        self._check_open()
        run = self._runs.get(name)
        if run is None:
            known = ", ".join(self._runs) or "none"
            raise NotFoundError(f"no run named {name!r} is open (open: {known})", run=name)
        return run

    def _worked(self, name: str) -> Run:
        """The run on which a service works now."""
        run = self._run(name)
        self._called[name] = asyncio.get_running_loop().time()
        return run

    def _make_run(self, spec: RunSpec, number: int) -> Run:
        clock = asyncio.get_running_loop().time
        return Run(
            spec,
            number,
            sampler=sampling.build(spec.sampler, self._samplers),
            commit_log=self._commit_log,
            expiry=self._expiry,
            clock=clock,
            quota=self._quota,
        )

    def _deadline(self, wait_s: float) -> float:
        return asyncio.get_running_loop().time() + max(0.0, wait_s)

    async def _grant(
        self, run: Run, stage: Stage, worker: str, limit: int, reserve: Reserve
    ) -> Lease | None:
        """Grant rows, make that durable, read what the stage reads; a caller that gets no answer gives the rows back.

        Damaged rows become dead letters; None if no others were granted.
        """
        granted = run.grant(stage, worker, limit)
        try:
            reserve(sum(each.nbytes for each in granted))
            await self._commit_log.flush()
            blocks, damaged = await self._payload.leased(granted, stage.reads, run.stages.writes)
            found = {*damaged, *[block.task for block in blocks]}
            for each in granted:
                task = each.block.task
                if task not in found and (fault := self._lost(run, each.block)):
                    damaged[task] = fault
            if damaged:
                await self._quarantine(run, stage, granted, damaged)
                if not blocks:
                    return None
        except BaseException:
            if self._runs.get(run.name) is run and not self._closing:
                tokens = {
                    uid: each.block.token for each in granted for uid in each.block.uids(run.name)
                }
                run.release(stage, tokens)
            raise
        return Lease(
            stage=stage.name, worker=worker, ttl_s=run.spec.lease_ttl_s, blocks=tuple(blocks)
        )

    async def _sound(self, run: Run, batch: TakenBatch) -> bool:
        """True once the batch is durable and all its payload can be read; False where it changed: look again.

        Before a trainer sees it for the first time, damaged rows become dead letters. Later they could be in its
        weights already: then `fetch` refuses them, and they leave when the trainer that takes over takes them again.
        """
        await self._commit_log.flush()
        if batch.answered:
            return True
        damaged = await self._payload.damaged(run.stored_in(batch))
        if self._runs.get(run.name) is not run or run.batches.get(batch.batch_id) is not batch:
            return False  # the queue went back to what is stored, or another trainer has the run
        if not batch.answered and damaged:
            for damage in damaged.values():
                log.error("run %s: rows become dead letters: %s", run.name, damage.reason)
            run.quarantine_taken(batch, damaged)
            run.shrink(batch)
            return False
        run.show(batch)
        return True

    async def _taken_before(self, run: str, taken: TakenBatch, step: int) -> Batch:
        if taken.step != step:
            raise ConflictError(
                f"batch {taken.batch_id} was taken for step {taken.step}, not {step}",
                batch_id=taken.batch_id,
            )
        await self._commit_log.flush()
        (value,) = await self._store.read([taken.manifest_key])
        if value is None:
            if self._run(run).batches.get(taken.batch_id) is taken:
                raise CorruptError(f"the store has lost the manifest of batch {taken.batch_id}")
            raise FencedError(f"batch {taken.batch_id} was given back while it was read")
        return read_manifest(run, taken, value)

    async def _quarantine(
        self, run: Run, stage: Stage, granted: Sequence[Unread], damaged: Mapping[str, str]
    ) -> None:
        """Granted rows of `damaged` tasks, with what is wrong, become dead letters: the others reach their worker."""
        if self._runs.get(run.name) is not run:
            return  # the queue went back to what is stored, where nobody was granted these rows
        for each in granted:
            if fault := damaged.get(each.block.task):
                log.error("run %s: rows become dead letters: %s", run.name, fault)
                run.quarantine_leased(stage, each.block, fault)
        await self._commit_log.flush()

    def _lost(self, run: Run, rows: RowBlock) -> str:
        """The message about `rows` whose payload the store lacks; empty if they have left."""
        try:
            self._run(run.name).resident(rows)
        except NotFoundError:
            return ""
        return f"the store has lost the payload of task {rows.task} of run {run.name}"

    def _stage_of(self, grant: Grant) -> str:
        return self._runs[grant.group.run].stages.ordered[grant.stage].name

    def _expired(self, grant: Grant) -> None:
        # A stream that began after the grant belongs to a restarted worker: the one that was granted the rows died.
        attended = any(
            heartbeat.began <= grant.since and heartbeat.serves(self._stage_of(grant))
            for heartbeat in self._attended.get(grant.worker, ())
        )
        self._runs[grant.group.run].expire(grant, attended=attended)

    async def _recover(self) -> None:
        """Replace the state in RAM by that of the store: at the start, and after a failed commit."""
        items = await self._store.load()
        self._expiry.clear()
        discarded, self._runs = self._runs, restore(items, self._make_run)
        self._payload.forget()
        self._commit_log.restarted()
        self._runs_signal.notify()
        for run in discarded.values():
            run.notify_all()


def _check_name(what: str, name: str) -> None:
    """Raises UserError: `name` comes from the caller, and is in logs, views and metrics."""
    if fault := name_fault(name):
        raise UserError(f"the name of the {what} {name[:80]!r}: {fault}")
