"""Random histories of a run against a simple model: every answer and the ledger must agree, also after restarts."""

from __future__ import annotations

import asyncio
import os
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from meshrl.contract.errors import ConflictError, FencedError, WaitTimeoutError
from meshrl.contract.rows import FAILED
from meshrl.contract.types import (
    REFERENCE_STAGE,
    REWARD_STAGE,
    ROLLOUT_STAGE,
    GroupPolicy,
    Lease,
    Outcome,
    StalePolicy,
    Uid,
)
from meshrl.testing.contract.queue_actors import Actors, batch_uids, spec, task, uids
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from .queue_model import STAGES, Model, ModelBatch, ModelRow

T = TypeVar("T")
STALENESS = 1


class QueueMachine(RuleBasedStateMachine):
    changes: ClassVar[dict[str, Any]] = {}
    """Fields of the spec in which this run differs."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        # Which groups a batch waits for is the concern of `test_slow_tasks`: the model takes the oldest.
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(Run, "sampled", lambda run, step: ())
        self.store = MemoryStore()
        stages = (ROLLOUT_STAGE, REWARD_STAGE, REFERENCE_STAGE)
        bounds = {"max_staleness": float(STALENESS), "max_attempts": 2, "lease_ttl_s": 1e6}
        opened = spec(stages=stages, **bounds, **self.changes)
        self.model = Model(opened)
        self.leases: list[tuple[Lease, list[ModelRow]]] = []
        self.takes = 0
        self.actors = Actors(self.run(TransferQueue.open(self.store)))
        self.run(self.actors.start(opened))

    def run(self, call) -> T:  # type: ignore[no-untyped-def]
        return self.loop.run_until_complete(call)

    def teardown(self) -> None:
        self.run(self.actors.queue.close())
        self.loop.close()
        self.patch.undo()

    # --- the feeder

    @initialize(work=st.booleans())
    def begin(self, work: bool) -> None:
        """Admit at once, so that most of a history has rows in the queue."""
        self.admit(4, 0)
        if work:
            self.work_through(100)

    @rule(count=st.integers(1, 5), back=st.integers(0, 2))
    def admit(self, count: int, back: int) -> None:
        start = max(0, len(self.model.seen) - back)
        names = [f"t{number:04d}" for number in range(start, start + count)]
        size = self.model.size
        expected = self.model.admit(names)
        try:
            new_tasks = [task(name, group_size=size) for name in names]
            assert self.run(self.actors.feed(new_tasks)) == expected
        except WaitTimeoutError:
            assert expected == 0

    # --- workers

    @rule(stage=st.sampled_from(STAGES), limit=st.integers(1, 6))
    def lease(self, stage: str, limit: int) -> None:
        self.leases += self._lease(stage, limit)

    def _lease(self, stage: str, limit: int) -> list[tuple[Lease, list[ModelRow]]]:
        """None or one."""
        rows = self.model.leasable(stage)[:limit]
        try:
            lease = self.run(self.actors.lease(stage, limit))
        except WaitTimeoutError:
            assert rows == []
            return []
        assert uids(lease) == [row.name for row in rows]
        for row, leased in zip(rows, lease.rows, strict=True):
            row.held[stage] = leased.token
            row.delivered[stage] += 1
            assert leased.delivery == row.delivered[stage]
        return [(lease, rows)]

    def _live(self, lease: Lease, rows: list[ModelRow]) -> bool:
        """True if by the model every row of the lease may be written."""
        for leased, row in zip(lease.rows, rows, strict=True):
            here = any(row is other for g in self.model.groups for other in g.rows)
            held = row.held.get(lease.stage) == leased.token
            if not here or not held:
                return False
        return True

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), twice=st.booleans())
    def write(self, data: st.DataObject, twice: bool) -> None:
        lease, rows = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        live = self._live(lease, rows)
        for _ in range(1 + twice):
            try:
                self.run(self.actors.write(lease))
                assert live
            except FencedError:
                assert not live
        if live:
            self._written(lease.stage, rows)

    def _written(self, stage: str, rows: list[ModelRow]) -> None:
        for row in rows:
            del row.held[stage]
            row.done.add(stage)
            if stage == "rollout":
                row.step = self.actors.version.step

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), release=st.booleans())
    def give_up(self, data: st.DataObject, release: bool) -> None:
        lease, rows = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        for leased, row in zip(lease.rows, rows, strict=True):
            here = any(row is other for g in self.model.groups for other in g.rows)
            live = here and row.held.get(lease.stage) == leased.token
            if release:
                self.run(self.actors.queue.release("run", lease.stage, {leased.uid: leased.token}))
                if live:
                    del row.held[lease.stage]
                    row.delivered[lease.stage] -= 1
                continue
            try:
                self.run(
                    self.actors.queue.fail(
                        "run", lease.stage, leased.uid, leased.token, Outcome.TIMEOUT, "slow"
                    )
                )
                assert live
                self.model.fail(row, lease.stage, "slow")
            except FencedError:
                assert not live

    @rule(stage=st.sampled_from(STAGES))
    def lose_a_row(self, stage: str) -> None:
        """The first row of a stage fails until it is a dead letter; without this rule few rows die."""
        for _ in range(self.model.attempts):
            for lease, (row,) in self._lease(stage, 1):
                (held,) = lease.rows
                failed = self.actors.queue.fail(
                    "run", stage, held.uid, held.token, Outcome.TIMEOUT, "slow"
                )
                self.run(failed)
                self.model.fail(row, stage, "slow")

    @rule(limit=st.sampled_from([100, 100, 4]))
    def work_through(self, limit: int) -> None:
        """Do everything that can be done; without this rule few histories reach a batch."""
        for stage in STAGES:
            for lease, rows in self._lease(stage, limit):
                self.run(self.actors.write(lease))
                self._written(stage, rows)

    # --- the trainer

    @rule(ahead=st.integers(0, 2), count=st.integers(1, 3), settle=st.booleans())
    def take(self, ahead: int, count: int, settle: bool) -> None:
        self.takes += 1
        name, step = f"b{self.takes}", self.model.published + ahead
        if step < self.model.committed:
            with pytest.raises(ConflictError, match="is committed"):
                self.run(self.actors.take(step, count, name=name))
            return
        expected = self.model.take(name, step, count)
        try:
            batch = self.run(self.actors.take(step, count, name=name))
        except WaitTimeoutError:
            assert expected is None
            return
        assert expected is not None
        assert batch_uids(batch) == [row.name for row in expected]
        assert self.run(self.actors.take(step, count, name=name)) == batch
        if settle:
            self._settle(self.model.batches[-1])

    def _settle(self, batch: ModelBatch) -> None:
        self.run(self.actors.settle(batch.step, batch.name))
        self.model.settle(batch)

    @rule()
    def settle_all(self) -> None:
        for batch in self.model.batches:
            self._settle(batch)

    @rule(data=st.data())
    def filter(self, data: st.DataObject) -> None:
        taken = [g for b in self.model.batches if not b.settled for g in b.groups]
        if taken:
            group = data.draw(st.sampled_from(taken))
            names = [
                row.uid for row in self.run(self._manifest(group.batch)) if row.group == group.task
            ]
            for _ in range(2):
                self.run(
                    self.actors.queue.filter(
                        "run", epoch=self.actors.epoch, uids=names, reason="easy"
                    )
                )
            self.model.filter(group, "easy")

    async def _manifest(self, batch: ModelBatch):  # type: ignore[no-untyped-def]
        return (await self.actors.take(batch.step, name=batch.name)).rows

    @precondition(lambda self: self.model.letters)
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        wanted = data.draw(st.permutations(self.model.letters))
        wanted = wanted[: data.draw(st.integers(1, len(wanted)))]
        names = [Uid("run", each.task, each.index, each.attempt) for each in wanted]
        expected = self.model.replay(wanted)
        assert self.run(self.actors.queue.replay("run", names)) == expected

    @rule()
    def publish(self) -> None:
        self.model.published += 1
        self.run(self.actors.publish(self.model.published))

    @rule(ahead=st.integers(-1, 1))
    def commit(self, ahead: int) -> None:
        step = max(0, self.model.published + ahead)
        self.model.commit(step)
        self.run(self.actors.commit(step))

    @rule(back=st.integers(0, 2))
    def resume(self, back: int) -> None:
        """A trainer dies and another resumes at the last checkpoint or a little later."""
        before = self.actors.epoch
        self.actors.epoch = self.run(self.actors.queue.acquire("run", "next")).epoch
        self.model.died(before)
        step = self.model.committed + back
        later = [b for b in self.model.batches if b.step >= step]
        expected = self.model.give_back(later)
        rewound = self.actors.queue.rewind("run", epoch=self.actors.epoch, step=step)
        assert self.run(rewound) == expected
        self.model.published = step
        self.run(self.actors.publish(step))

    @rule(times=st.integers(2, 9), count=st.integers(1, 3), say=st.booleans())
    def die_of_it(self, times: int, count: int, say: bool) -> None:
        """Trainers that die of what they take, one after the other; some say that its step failed."""
        for _ in range(times):
            taken = len(self.model.batches)
            self.take(0, count, settle=False)
            for batch in self.model.batches[taken:]:
                if say and len(batch.groups) == 1:
                    self._fail_step(batch)
            self.resume(0)

    def _fail_step(self, batch: ModelBatch) -> None:
        epoch, reason = self.actors.epoch, f"{FAILED}: of itself"
        uids = [Uid("run", row.group.task, row.index, row.attempt) for row in batch.groups[0].rows]
        self.run(self.actors.queue.filter("run", epoch=epoch, uids=uids, reason=reason))
        self.model.failed(batch, epoch, reason)

    # --- the queue itself

    @rule(crash=st.booleans())
    def restart(self, crash: bool) -> None:
        if crash:
            self.actors.queue._committer.cancel()
            self.run(asyncio.sleep(0))
        else:
            self.run(self.actors.queue.close())
        self.actors.queue = self.run(TransferQueue.open(self.store))
        self.model.restarted()

    @invariant()
    def the_ledgers_agree(self) -> None:
        ledger = self.run(self.actors.ledger())
        model = self.model
        assert ledger.admitted == model.admitted
        assert ledger.trained == model.trained
        assert (ledger.filtered, ledger.stale) == (model.filtered, model.stale)
        assert ledger.dead_lettered == model.dead
        letters = self.run(self.actors.queue.dead_letters("run"))
        names = {f"{dead.uid.task}.{dead.uid.index}.{dead.uid.attempt}" for dead in letters}
        assert names == {letter.name for letter in model.letters}
        resident = {state: count for state, count in ledger.resident.items() if count}
        assert resident == model.resident()

    @invariant()
    def the_ready_sets_agree(self) -> None:
        run = self.actors.queue._runs["run"]
        for stage in STAGES:
            assert run.num_ready(run.stages[stage]) == len(self.model.leasable(stage))
        assert len(run.complete) == sum(group.complete for group in self.model.groups)
        assert run.in_batches == sum(group.batch is not None for group in run.groups.values())
        complete = run.complete
        assert len(complete._taken_before) + len(complete._sampler) == len(complete)
        open_bytes = sum(
            group.nbytes
            for group in run.groups.values()
            if not (group.batch is not None and group.batch.consumed)
        )
        assert run.open_bytes == open_bytes


class KOfNMachine(QueueMachine):
    changes: ClassVar[dict[str, Any]] = {
        "group_size": 3,
        "group_policy": GroupPolicy.K_OF_N,
        "group_k": 2,
        "stale_policy": StalePolicy.DROP,
    }


class ReplaceSiblingMachine(QueueMachine):
    changes: ClassVar[dict[str, Any]] = {"group_policy": GroupPolicy.REPLACE_SIBLING}


def lives(machine: type[QueueMachine]) -> Any:
    """The machine as a test case; QUEUE_LIVES in the environment sets the number of histories."""
    case = machine.TestCase
    case.settings = settings(
        max_examples=int(os.environ.get("QUEUE_LIVES", "80")),
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    return case


TestAll = lives(QueueMachine)
TestKOfN = lives(KOfNMachine)
TestReplaceSibling = lives(ReplaceSiblingMachine)
