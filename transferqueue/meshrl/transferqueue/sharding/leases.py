"""Leases from several shards: one after the other while there is work, a waiting call to all when there is none.

    sweep   each shard in turn until the limit is reached, without a wait; the next call begins with the next shard
    park    every shard is asked to answer when it has rows, which grants none ──▶ sweep those that have some

After a lease that got all it wanted the next one sweeps: while there is work, one shard serves a whole lease. Else it
parks at once, and rows that are there answer its calls.

A lease is granted only by a call that is never cancelled for the answer of another shard: a grant whose answer is
lost holds its rows until its time to live is over, and costs them an attempt. A shard that does not answer a sweep
soon (it restarts) is skipped until it does; what it grants then is given back untouched. A parked call learns of
added shards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from meshrl.contract.errors import EndOfDataError, MeshError, UserError, WaitTimeoutError
from meshrl.contract.types import Lease, RunSpec, Version
from meshrl.contract.words import counted
from meshrl.transferqueue.sharding.admission import free
from meshrl.transferqueue.sharding.fan_out import Questions, any_of
from meshrl.transferqueue.sharding.port import RowCounts, Shard
from meshrl.transferqueue.sharding.watcher import ShardWatcher

LAG_S = 0.5
"""A shard that takes longer for a call without a wait is passed over until it answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseQuestion:
    """What a caller of `lease` wants."""

    runs: tuple[str, ...]
    stage: str
    worker: str
    limit: int
    at_least: int
    version: Version | None

    def of(
        self, shard: Shard, wait_s: float, *, runs: Sequence[str] = (), limit: int = 0
    ) -> Coroutine[Any, Any, Lease]:
        """A call of `lease` on one shard."""
        return shard.lease(
            list(runs) or list(self.runs),
            self.stage,
            worker=self.worker,
            limit=limit or self.limit,
            version=self.version,
            wait_s=wait_s,
        )

    @property
    def work(self) -> tuple[tuple[str, ...], str]:
        """Runs and stage: what is leased from, whoever leases."""
        return self.runs, self.stage

    @property
    def why(self) -> str:
        """What is waited for."""
        at = f" at version {self.version}" if self.version else ""
        return f"{counted(self.at_least, 'row')} of stage {self.stage}{at}"

    def fresh(self, spec: RunSpec, epoch: int, published: Version) -> bool:
        """Whether rows of the run may go to this engine. Raises UserError when it did not give its version."""
        if not spec.gated or any(stage.reads for stage in spec.stages if stage.name == self.stage):
            return True
        if self.version is None:
            raise UserError(
                f"run {spec.run} is gated: a lease of stage {self.stage} must name its engine's version"
            )
        behind = published.step - self.version.step
        return self.version.epoch == epoch and behind <= spec.max_staleness

    def too_old(self, run: str, published: Version) -> WaitTimeoutError:
        """The error that ends the wait of an engine whose version a publish has made too old."""
        return WaitTimeoutError(
            f"version {self.version} is too old for run {run} at {published}:"
            " ask again with the engine's version"
        )


class ShardedLeases:
    """The leases of one router, whose list of shards may grow."""

    def __init__(
        self,
        shards: Sequence[Shard],
        watcher: ShardWatcher,
        granted: Callable[[int, Lease], None],
        *,
        lag_s: float = LAG_S,
    ) -> None:
        """`granted` is called with the number of the shard and the lease; a shard lags after `lag_s` of silence."""
        self._lag_s = lag_s
        self._shards = shards
        self._watcher = watcher
        self._granted = granted
        self._next = 0
        self._plenty: set[tuple[tuple[str, ...], str]] = set()
        """Runs and stages whose last lease got all that it wanted."""
        self._lagging: dict[int, asyncio.Task[Lease]] = {}
        self._releases: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Cancel what is under way."""
        tasks = [*self._lagging.values(), *self._releases]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def lease(
        self, question: LeaseQuestion, specs: Mapping[str, RunSpec], wait_s: float, since: str
    ) -> Lease:
        """See Queue. `specs` are those of the runs that are open; `since` is the shard list that was learned.

        Raises ShardsAdded where it would have waited.
        """
        deadline = asyncio.get_running_loop().time() + max(0.0, wait_s)
        if question.at_least > 1:
            return await self._fixed(question, specs, deadline, since)
        first, self._next = self._next, self._next + 1
        turns = [(first + turn) % len(self._shards) for turn in range(len(self._shards))]
        lease = None
        if wait_s <= 0 or self._sweeps_first(question, specs):
            lease = await self._sweep(question, specs, turns)
        if lease is None:
            lease = await self._park(question, specs, deadline, since)
        (self._plenty.discard if lease.num_rows < question.limit else self._plenty.add)(
            question.work
        )
        return lease

    def _sweeps_first(self, question: LeaseQuestion, specs: Mapping[str, RunSpec]) -> bool:
        """After a full lease, or where runs differ in priority: only a sweep of all shards finds the highest."""
        return (
            question.work in self._plenty
            or len({_priority(specs, run) for run in question.runs}) > 1
        )

    # --- any rows

    async def _sweep(
        self, question: LeaseQuestion, specs: Mapping[str, RunSpec], turns: Iterable[int]
    ) -> Lease | None:
        """Rows that are there now, of the run with the highest priority that has some on any shard of `turns`."""
        ranked = sorted(question.runs, key=lambda run: -_priority(specs, run))
        for _, equals in groupby(ranked, key=lambda run: _priority(specs, run)):
            parts = await self._gathered(question, tuple(equals), turns)
            if parts:
                return _joined([part for _, part in parts])
        return None

    async def _gathered(
        self, question: LeaseQuestion, runs: tuple[str, ...], turns: Iterable[int]
    ) -> list[tuple[int, Lease]]:
        """Leases of one of `runs` by shard, together at most `limit` rows; maybe none."""
        parts: list[tuple[int, Lease]] = []
        left = question.limit
        try:
            for number in turns:
                if not left:
                    break
                if number in self._lagging:
                    continue
                call = question.of(self._shards[number], 0.0, runs=runs, limit=left)
                try:
                    lease = await self._soon(number, call)
                except (WaitTimeoutError, EndOfDataError, UserError):
                    continue  # a parked call reports what is wrong with the question
                if lease is not None:
                    parts.append((number, lease))
                    self._granted(number, lease)
                    left -= lease.num_rows
                    runs = (lease.run,)
        except BaseException:
            self._give_all_back(parts)
            raise
        return parts

    async def _soon(self, number: int, call: Coroutine[Any, Any, Lease]) -> Lease | None:
        """The lease, or None from a shard that lags: what it grants later is given back."""
        task = asyncio.ensure_future(call)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._lag_s)
        except asyncio.CancelledError:
            await self._drop({task: number})
            raise
        if done:
            return task.result()
        self._lagging[number] = task
        task.add_done_callback(lambda late: self._caught_up(number, late))
        return None

    def _caught_up(self, number: int, late: asyncio.Task[Lease]) -> None:
        self._lagging.pop(number, None)
        if not late.cancelled() and late.exception() is None:
            self._give_back(number, late.result())

    async def _park(
        self, question: LeaseQuestion, specs: Mapping[str, RunSpec], deadline: float, since: str
    ) -> Lease:
        """Wait until some shard has rows, and sweep: only questions that grant nothing are ever cancelled."""
        clock = asyncio.get_running_loop().time
        questions = Questions(self._watcher.until_shards_added(since))
        try:
            while True:
                left = max(0.0, deadline - clock())
                for number in questions.unasked(len(self._shards)):
                    questions.ask(number, self._until_rows(number, question, left))
                lease = await self._sweep(question, specs, await questions.answered())
                if lease is not None:
                    return lease
                if left <= 0:
                    raise WaitTimeoutError(f"timed out waiting for {question.why}")
        finally:
            await questions.close()

    async def _until_rows(self, number: int, question: LeaseQuestion, wait_s: float) -> None:
        """For a shard that lags, wait for the answer that it still owes: until then sweeps skip it."""
        if (late := self._lagging.get(number)) is not None:
            await asyncio.wait({late}, timeout=wait_s)
        await self._shards[number].until_rows(
            list(question.runs),
            question.stage,
            worker=question.worker,
            limit=question.limit,
            version=question.version,
            wait_s=wait_s,
        )

    async def _drop(self, asked: Mapping[asyncio.Task[Lease], int]) -> None:
        """Cancel the calls, and give back what was granted all the same."""
        for task in asked:
            task.cancel()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for number, answer in zip(asked.values(), answers, strict=True):
            if isinstance(answer, Lease):
                self._give_back(number, answer)

    def _give_all_back(self, parts: Sequence[tuple[int, Lease]]) -> None:
        for number, part in parts:
            self._give_back(number, part)

    def _give_back(self, number: int, lease: Lease) -> None:
        """In the background: nobody waits for it; if it fails, the leases expire."""
        release = asyncio.ensure_future(self._release(self._shards[number], lease))
        self._releases.add(release)
        release.add_done_callback(self._releases.discard)

    @staticmethod
    async def _release(shard: Shard, lease: Lease) -> None:
        if lease.groups:
            tokens = lease.token_of()
            try:
                await shard.release(lease.run, lease.stage, tokens)
            except MeshError:
                return  # it expires

    # --- a fixed number of rows

    async def _fixed(
        self, question: LeaseQuestion, specs: Mapping[str, RunSpec], deadline: float, since: str
    ) -> Lease:
        """`at_least` rows of one run together, whichever shards they are on; from shard 0 up."""
        clock = asyncio.get_running_loop().time
        seen: dict[str, Version] = {}
        while True:
            shards = tuple(self._shards)
            answers = [await self._rows(shard, question) for shard in shards]
            for run in question.runs:
                parts = [row for rows in answers for row in rows or () if row.run == run]
                if len(parts) < len(shards):
                    continue
                spec = specs.get(run)
                if (
                    spec is None
                    or not _open(question, spec, parts, seen)
                    or not _enough(question, spec, parts)
                ):
                    continue
                lease = await self._together(
                    question, run, min(question.at_least, sum(p.ready for p in parts))
                )
                if lease is not None:
                    return lease
            if all(rows is None for rows in answers):
                raise EndOfDataError(f"nothing is left to lease in {', '.join(question.runs)}")
            left = deadline - clock()
            if left <= 0:
                raise WaitTimeoutError(f"timed out waiting for {question.why}")
            questions = (
                shard.rows(
                    question.runs,
                    question.stage,
                    worker=question.worker,
                    unlike=rows,
                    why=question.why,
                    wait_s=left,
                )
                for shard, rows in zip(shards, answers, strict=True)
                if rows is not None
            )
            await any_of([*questions, self._watcher.until_shards_added(since)])

    async def _rows(self, shard: Shard, question: LeaseQuestion) -> Sequence[RowCounts] | None:
        """None where nothing is left and nothing will come."""
        try:
            return await shard.rows(question.runs, question.stage, worker=question.worker)
        except EndOfDataError:
            return None

    async def _together(self, question: LeaseQuestion, run: str, wanted: int) -> Lease | None:
        """At least `wanted` rows, or None when somebody else was faster: then none is kept."""
        parts = await self._gathered(question, (run,), range(len(self._shards)))
        if sum(part.num_rows for _, part in parts) < wanted:
            self._give_all_back(parts)
            return None
        return _joined([part for _, part in parts])


def _joined(parts: Sequence[Lease]) -> Lease:
    return replace(parts[0], groups=tuple(group for part in parts for group in part.groups))


def _priority(specs: Mapping[str, RunSpec], run: str) -> int:
    return specs[run].priority if run in specs else 0


def _open(
    question: LeaseQuestion, spec: RunSpec, parts: Sequence[RowCounts], seen: dict[str, Version]
) -> bool:
    """`leases.open_to`, on every shard; a publish that makes the version too old ends the wait."""
    published = max(part.published for part in parts)
    if question.fresh(spec, max(part.epoch for part in parts), published):
        return True
    if published != seen.setdefault(spec.run, published):
        raise question.too_old(spec.run, published)
    return False


def _enough(question: LeaseQuestion, spec: RunSpec, parts: Sequence[RowCounts]) -> bool:
    """`leases.enough`, over all shards."""
    ready = sum(part.ready for part in parts)
    if ready == 0 or ready >= question.at_least or not spec.gated:
        return ready > 0
    can_grow = not all(part.feed_closed for part in parts) and free(spec, parts) > 0
    return not sum(part.upstream for part in parts) and not can_grow
