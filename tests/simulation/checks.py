"""Invariants of every run of the mesh, checked while it runs and when it has ended.

QueueServicer ──▶ WatchedQueue ──▶ TransferQueue      each answered call: tokens, batches
World ──every second──▶ check_resident                 the ledger against the rows
World ──at the end──▶ check_history                    the weights against the stored ledger
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from typing_extensions import override

from meshrl.contract.ports import Reserve, unbounded
from meshrl.contract.types import (
    Batch,
    Lease,
    LeasedRow,
    Ledger,
    Outcome,
    RowBlock,
    RunSpec,
    RunState,
    StalePolicy,
    Uid,
    Version,
    Waiting,
)
from meshrl.transferqueue.model.batches import REISSUED
from meshrl.transferqueue.model.group import Grant, bits
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.why_waiting import DUE
from tests.simulation.stand_ins import TrainedRow

Problem = Callable[[str], None]

PATIENT_LOOKS: Final = 3
"""A look may fall between a signal and the waiting call that it wakes."""
BEHIND_S: Final = 40.0
BEHIND_STEPS: Final = 6
"""An engine that serves the same version for so long, while another took over so many, is left behind."""
OVERDUE_S: Final = 5.0
"""A lease that is over for longer than this has not been taken back."""
LONGEST_LEASE_S: Final = 1500.0
"""Seconds after which a row's worker has forgotten it, although it renews the lease."""
MOST_ATTEMPTS: Final = 64
"""A row that is sampled more often than this is sampled for ever."""


class RowHistory:
    """The queue's answers over all its incarnations: each row's life must be a legal path."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._newest: dict[tuple[str, Uid], tuple[int, str]] = {}
        """The newest token and its holder, by stage and row."""
        self._written: dict[tuple[str, Uid], int] = {}
        """Token of the accepted write, by stage and row."""
        self._batches: dict[tuple[int, str], frozenset[Uid]] = {}
        """Batches by epoch and by the batch id that was asked for."""
        self._batch_of: dict[tuple[int, Uid], str] = {}
        self._settled: dict[tuple[int, int], set[str]] = {}
        self._tried: dict[Uid, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        """Tokens of the appends that came in, by row and place in its response."""
        self._appended: dict[Uid, int] = {}
        """Durable tokens of each response, as answered."""
        self._epoch = 0
        self.sampled: Counter[str] = Counter()
        """Rows leased for sampling, by task."""

    def acquired(self, epoch: int) -> None:
        """A trainer has the run."""
        if epoch <= self._epoch:
            self._problem(f"epoch {epoch} was given out after epoch {self._epoch}")
        self._epoch = max(epoch, self._epoch)

    def leased(self, stage: str, worker: str, lease: Lease) -> None:
        """Rows were given to `worker`."""
        for row in lease.rows:
            key = (stage, row.uid)
            token, owner = self._newest.get(key, (-1, ""))
            if row.token <= token:
                self._problem(
                    f"row {row.uid}, stage {stage}: token {row.token} for {worker} after token {token}"
                    f" for {owner}"
                )
            if key in self._written:
                self._problem(f"row {row.uid}, stage {stage}: leased again after it was written")
            self._newest[key] = (row.token, worker)
            self._begins(row)
            if row.uid.attempt > MOST_ATTEMPTS:
                self._problem(f"row {row.uid} is sampled for ever")
            if stage == "rollout":
                self.sampled[row.uid.task] += 1

    def holders(
        self, run: str, stage: str, blocks: Sequence[RowBlock]
    ) -> dict[Uid, tuple[int, int]]:
        """Each row of a write that comes in, with its token and the newest one."""
        found = {}
        for block in blocks:
            for uid in block.uids(run):
                found[uid] = (block.token, self.newest(stage, uid))
        return found

    def written(self, stage: str, rows: Mapping[Uid, tuple[int, int]]) -> None:
        """A write was accepted; `rows` as `holders` gave them."""
        for uid, (token, newest) in rows.items():
            before = self._written.setdefault((stage, uid), token)
            if before != token:
                self._problem(f"row {uid}, stage {stage}: written under {before} and under {token}")
            else:
                self.held("a write", stage, uid, token, newest)

    def _begins(self, row: LeasedRow) -> None:
        """A row was given out with what was appended to it."""
        tokens = row.prefix.get("tokens", np.empty(0, dtype=np.int32)).tolist()
        tried = self._tried[row.uid]
        if strange := [place for place, token in enumerate(tokens) if token not in tried[place]]:
            self._problem(
                f"row {row.uid} begins with a token that nobody appended, at {strange[0]}"
            )
        if row.prefix and len(tokens) < (kept := self._appended.get(row.uid, 0)):
            self._problem(f"row {row.uid} begins with {len(tokens)} tokens, {kept} were appended")

    def appending(self, run: str, blocks: Sequence[RowBlock]) -> None:
        """An append comes in."""
        for uid, start, tokens in _progress(run, blocks):
            for place, token in enumerate(tokens, start):
                self._tried[uid][place].add(token)

    def appended(
        self, stage: str, rows: Mapping[Uid, tuple[int, int]], run: str, blocks: Sequence[RowBlock]
    ) -> None:
        """An append was accepted; `rows` as `holders` gave them."""
        for uid, start, tokens in _progress(run, blocks):
            self._appended[uid] = max(self._appended.get(uid, 0), start + len(tokens))
            self.held("append", stage, uid, *rows[uid])

    def newest(self, stage: str, uid: Uid) -> int:
        """The newest token under which a row was given out."""
        return self._newest.get((stage, uid), (-1, ""))[0]

    def held(self, verb: str, stage: str, uid: Uid, token: int, newest: int) -> None:
        """`verb` was accepted of whoever had the row under `token`, and `newest` was given out when it came in."""
        if token < newest:
            self._problem(
                f"row {uid}, stage {stage}: {verb} under token {token} was accepted, and the row had been"
                f" given out under token {newest}"
            )

    def taken(self, epoch: int, batch_id: str, batch: Batch) -> None:
        """A batch was given to the trainer of `epoch`, which asked for `batch_id`."""
        uids = frozenset(row.uid for row in batch.rows)
        before = self._batches.setdefault((epoch, batch_id), uids)
        if not uids <= before:
            self._problem(f"batch {batch_id} of epoch {epoch} was taken twice and differs")
        for uid in sorted(uids):
            other = self._batch_of.setdefault((epoch, uid), batch_id)
            if other != batch_id:
                self._problem(f"row {uid} is in batches {other} and {batch_id} of one epoch")

    def fenced(self, epoch: int) -> bool:
        """True if a newer trainer has the run."""
        return epoch < self._epoch

    def accepted(self, verb: str, epoch: int) -> None:
        """A call of a trainer that was fenced when it came in had an effect."""
        self._problem(f"{verb} of epoch {epoch} was accepted, epoch {self._epoch} has the run")


def _progress(run: str, blocks: Sequence[RowBlock]) -> Iterator[tuple[Uid, int, list[int]]]:
    """Row, place and tokens of each entry of an append."""
    for block in blocks:
        rows = zip(block.uids(run), block.starts, block.columns(), strict=True)
        for uid, start, columns in rows:
            yield uid, start, columns["tokens"].tolist()


class WatchedQueue(TransferQueue):
    """A queue whose answers go into a `RowHistory`. Mixed in before the class that is simulated."""

    history: RowHistory

    @override
    async def acquire(self, run: str, owner: str) -> RunState:
        state = await super().acquire(run, owner)
        self.history.acquired(state.epoch)
        return state

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
        lease = await super().lease(
            runs,
            stage,
            worker=worker,
            limit=limit,
            at_least=at_least,
            version=version,
            wait_s=wait_s,
            reserve=reserve,
        )
        self.history.leased(stage, worker, lease)
        return lease

    @override
    async def write(self, run: str, stage: str, blocks: Sequence[RowBlock]) -> None:
        rows = self.history.holders(run, stage, blocks)
        await super().write(run, stage, blocks)
        self.history.written(stage, rows)

    @override
    async def append(self, run: str, stage: str, blocks: Sequence[RowBlock]) -> None:
        rows = self.history.holders(run, stage, blocks)
        self.history.appending(run, blocks)
        await super().append(run, stage, blocks)
        self.history.appended(stage, rows, run, blocks)

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
        newest = self.history.newest(stage, uid)
        await super().fail(run, stage, uid, token, outcome, reason, lasting)
        self.history.held("fail", stage, uid, token, newest)

    @override
    async def take(
        self, run: str, *, epoch: int, step: int, groups: int, batch_id: str, wait_s: float
    ) -> Batch:
        batch = await super().take(
            run, epoch=epoch, step=step, groups=groups, batch_id=batch_id, wait_s=wait_s
        )
        self.history.taken(epoch, batch_id, batch)
        return batch

    @override
    async def settle(self, run: str, *, epoch: int, step: int, batch_id: str) -> None:
        call = super().settle(run, epoch=epoch, step=step, batch_id=batch_id)
        await self._fenced("settle", epoch, call)

    @override
    async def commit(self, run: str, *, epoch: int, step: int) -> None:
        await self._fenced("commit", epoch, super().commit(run, epoch=epoch, step=step))

    @override
    async def filter(self, run: str, *, epoch: int, uids: Sequence[Uid], reason: str) -> None:
        call = super().filter(run, epoch=epoch, uids=uids, reason=reason)
        await self._fenced("filter", epoch, call)

    async def _fenced(self, verb: str, epoch: int, call: Awaitable[None]) -> None:
        fenced = self.history.fenced(epoch)
        await call
        if fenced:
            self.history.accepted(verb, epoch)


def check_resident(run: Run, problem: Problem) -> None:
    """The ledger balances, and counts the rows that are there."""
    ledger = run.ledger.snapshot(run.name)
    if not ledger.balanced:
        problem(f"the ledger does not balance: {ledger}")
    counted: Counter[str] = Counter()
    for group in run.groups.values():
        counted.update(str(run.state_of(group, index)) for index in bits(group.present))
    if any(counted[state] != rows for state, rows in ledger.resident.items()):
        problem(f"the ledger counts {dict(ledger.resident)}, the rows are {dict(counted)}")
    if run.unconsumed < 0:
        problem(f"{run.unconsumed} groups hold admission credit")


class Liveness:
    """Check that no call waits for what is there."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._overdue: Counter[str] = Counter()
        """Looks in a row at which something was overdue."""

    def look(self, run: Run, waits: Sequence[Waiting]) -> None:
        """Called again and again; `waits` is what `why_waiting` says."""
        found = set()
        taking = any(
            wait.what.startswith("take") and " waits for " in wait.what and DUE not in wait.what
            for wait in waits
        )
        if taking and len(run.complete) >= run.spec.batch_groups:
            found.add("a take waits although enough groups are complete: nobody woke it")
        now = run.clock()
        for grant in _leases(run):
            if run.seconds_left(grant) < -OVERDUE_S:
                found.add(
                    f"a lease of {grant.worker} is over, and its rows are not given out again"
                )
            if now - grant.since > LONGEST_LEASE_S:
                found.add(f"{grant.worker} renews a lease for ever")
        for name in list(self._overdue):
            if name not in found:
                del self._overdue[name]
        for name in found:
            self._overdue[name] += 1
            if self._overdue[name] == PATIENT_LOOKS:
                self._problem(name)


class Followers:
    """Each engine gets on while others do."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._since: dict[str, tuple[Version, Version, float]] = {}
        """The engine's version, the newest engine's version when it began to serve it, and the time, by service."""

    def look(self, served: Mapping[str, Version], now: float) -> None:
        """Called again and again; `served` are the versions of the engines that live, by service."""
        newest = max(served.values(), default=Version(0, 0))
        self._since = {name: each for name, each in self._since.items() if name in served}
        for name, version in served.items():
            known, then, since = self._since.setdefault(name, (version, newest, now))
            if known != version or then.epoch != newest.epoch:
                self._since[name] = version, newest, now
            elif newest.step - then.step >= BEHIND_STEPS and now - since > BEHIND_S:
                self._problem(f"{name} stays at version {version}, while others come to {newest}")
                self._since[name] = version, newest, math.inf

    def forget(self) -> None:
        """Something goes wrong now: count anew."""
        self._since.clear()


def check_idle(run: Run, problem: Problem) -> None:
    """All workers have drained: nobody holds a row."""
    if holders := sorted({grant.worker for grant in _leases(run)}):
        problem(f"leases are left after their workers have drained: {', '.join(holders)}")


def _leases(run: Run) -> Iterator[Grant]:
    return (grant for group in run.groups.values() for grant in group.grants if grant.mask)


def check_history(
    spec: RunSpec, fed: int, ledger: Ledger, weights: Sequence[TrainedRow], problem: Problem
) -> None:
    """The weights have each fed row once, or the ledger says how it left. `fed` is rows."""
    seen = Counter((row.uid.task, row.uid.index) for row in weights)
    for (task, index), times in seen.items():
        if times > 1:
            problem(f"row {index} of task {task} is in the weights {times} times")
    for row in weights:
        staleness = row.step - row.oldest.step
        if not math.isinf(spec.max_staleness) and staleness > spec.max_staleness:
            problem(f"{row.uid} was trained at step {row.step} with tokens of {row.oldest}")
    if resident := {state: rows for state, rows in ledger.resident.items() if rows}:
        problem(f"rows stay in the queue: {resident}")
    if ledger.trained != len(weights):
        problem(f"the ledger has {ledger.trained} trained rows, the weights {len(weights)}")
    stale = dict(ledger.stale)
    reissued = stale.pop(REISSUED, 0) if spec.stale_policy is StalePolicy.REISSUE else 0
    if ledger.admitted - reissued != fed and not ledger.dead_lettered:
        problem(f"{ledger.admitted} rows were admitted, {reissued} of them again; {fed} were fed")
    gone = sum(ledger.filtered.values()) + sum(ledger.dead_lettered.values()) + sum(stale.values())
    if ledger.admitted - reissued != len(weights) + gone:
        problem(f"{ledger.admitted - reissued} rows came in, {len(weights)} trained, {gone} left")
