"""Several queues as one: the port of contract/ports.py over shards.

    admit ── feeding.py ─┐                     ┌── leasing.py ── lease
    task ─▶ its shard: write, fail, release, renew, fetch, filter, replay
    every shard: publish, commit, close_feed, rewind, acquire ── shard 0 has the last word (and the first epoch)
    take, settle ── taking.py                    ledger, why_waiting ── books.py

**Half-done calls are repaired by repeating them.** What goes to every shard is idempotent there, and shard 0, which
answers `run_state`, hears of it last: what it tells, every shard knows. An epoch is made by shard 0 and followed by
the others; whoever opens the run brings a shard that is behind up to shard 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from meshrl.contract.errors import FencedError, NotFoundError, UserError
from meshrl.contract.nouns import (
    Batch,
    DeadLetter,
    JournalGroup,
    Lease,
    Ledger,
    Outcome,
    PackedGroup,
    PayloadGroup,
    RunSpec,
    RunState,
    Siblings,
    Task,
    Uid,
    Version,
    Waiting,
)
from meshrl.contract.rowwise import RowVerbs
from meshrl.transferqueue.sharding import books, membership
from meshrl.transferqueue.sharding.asking import all_of, by_key
from meshrl.transferqueue.sharding.feeding import Feeding
from meshrl.transferqueue.sharding.leasing import Ask, Leasing
from meshrl.transferqueue.sharding.placing import Members
from meshrl.transferqueue.sharding.port import Shard
from meshrl.transferqueue.sharding.taking import Taking

Answer = TypeVar("Answer")

PLACES = 1 << 18
"""Tasks of a run with added shards whose place is kept in mind."""
RENEW_S = 5.0
"""A renewal waits no longer for a shard that restarts: the leases of the others must not end meanwhile."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What the router knows of a run."""

    spec: RunSpec
    members: Members
    taking: Taking


class ShardedQueue(RowVerbs):
    """A Queue over shards. The order of `shards` must be the same for everybody, and new ones come last."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        if not shards:
            raise UserError("a queue needs at least one shard")
        self._shards = tuple(shards)
        self._runs: dict[str, _Known] = {}
        self._leasing = Leasing(self._shards)
        self._places: dict[tuple[str, str], int] = {}

    @property
    def num_shards(self) -> int:
        """How many there are."""
        return len(self._shards)

    async def close(self) -> None:
        """End what is under way; the shards are the caller's."""
        await self._leasing.close()

    # --- runs

    async def open_run(self, spec: RunSpec) -> RunState:
        """See Queue. A run that is on fewer shards than there are goes on with all of them: new tasks only."""
        first, *others = self._shards
        members = await membership.join(first, spec.run, len(self._shards))
        state = await first.open_run(spec)
        await all_of(shard.open_run(spec) for shard in others)
        # Shard 0 hears of everything last, but for epochs: whoever is behind it missed something. An epoch that began
        # since then has its own trainer to bring the shards along.
        with suppress(FencedError):
            await all_of(shard.follow(state, "") for shard in others)
        self._know(spec, members)
        return state

    def _know(self, spec: RunSpec, members: Members) -> _Known:
        known = self._runs.get(spec.run)
        if known is None or known.members != members:
            taking = Taking(spec.run, self._shards[: members.count])
            known = self._runs[spec.run] = _Known(spec, members, taking)
        return known

    async def _known(self, run: str) -> _Known:
        """Of an open run. Raises NotFoundError."""
        known = self._runs.get(run)
        if known is None:
            state = await self._shards[0].run_state(run)
            members = await membership.read(self._shards[0], run)
            assert members is not None, "the run is open"
            if members.count > len(self._shards):
                raise UserError(
                    f"run {run} is on {members.count} queue shards, and {len(self._shards)} are given"
                )
            known = self._know(state.spec, members)
        return known

    async def _on(self, run: str) -> Sequence[Shard]:
        """The shards of a run."""
        return (await self._known(run)).taking.shards

    async def _others_first(
        self, run: str, call: Callable[[Shard], Awaitable[Answer]]
    ) -> list[Answer]:
        """Call every shard, shard 0 when all others have answered; the answers, its own first."""
        first, *others = await self._on(run)
        answers = await all_of(call(shard) for shard in others)
        return [await call(first), *answers]

    async def run_state(self, run: str) -> RunState:
        """See Queue."""
        return await self._shards[0].run_state(run)

    async def acquire(self, run: str, owner: str) -> RunState:
        """See Queue. Shard 0 makes the epoch; the others follow."""
        known = await self._known(run)
        first, *others = known.taking.shards
        known.taking.plans.clear()
        state = await first.acquire(run, owner)
        await all_of(shard.follow(state, owner) for shard in others)
        return state

    async def publish(self, run: str, version: Version) -> None:
        """See Queue."""
        await self._others_first(run, lambda shard: shard.publish(run, version))

    # --- the feeder

    async def admit(self, run: str, tasks: Sequence[Task], *, cursor: str, wait_s: float) -> int:
        """See Queue, and feeding.py."""
        known = await self._known(run)
        feeding = Feeding(shards=known.taking.shards, members=known.members, spec=known.spec)
        return await feeding.admit(tasks, cursor=cursor, wait_s=wait_s)

    async def close_feed(self, run: str) -> None:
        """See Queue."""
        await self._others_first(run, lambda shard: shard.close_feed(run))

    # --- stages

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
    ) -> Lease:
        """See Queue, and leasing.py. Rows come oldest first from each shard; which shard is first changes."""
        if limit < 1 or not runs:
            raise UserError(f"a lease wants at least one row of at least one run, not {limit}")
        ask = Ask(
            runs=tuple(runs),
            stage=stage,
            worker=worker,
            limit=limit,
            at_least=min(limit, at_least),
            version=version,
        )
        return await self._leasing.lease(ask, await self._specs(runs), wait_s)

    async def _specs(self, runs: Sequence[str]) -> Mapping[str, RunSpec]:
        """Of those that are open."""
        found = {}
        for run in runs:
            try:
                found[run] = (await self._known(run)).spec
            except NotFoundError:
                continue
        return found

    async def renew(self, run: str, stage: str, worker: str, uids: Sequence[Uid]) -> Sequence[Uid]:
        """See Queue. Of a shard that is away nothing is said to be lost: it will say so when it is back."""
        parts = await self._by_shard(run, uids, _task_of_uid)
        asked = [
            asyncio.ensure_future(self._shards[number].renew(run, stage, worker, part))
            for number, part in parts.items()
        ]
        if not asked:
            return []
        done, late = await asyncio.wait(asked, timeout=RENEW_S)
        for task in late:
            task.cancel()
        return [uid for task in asked if task in done for uid in task.result()]

    async def write_packed(self, run: str, stage: str, groups: Sequence[PackedGroup]) -> None:
        """See Queue. All or none of the groups of each shard."""
        parts = await self._by_shard(run, groups, lambda group: group.task)
        await all_of(
            self._shards[number].write_packed(run, stage, part)
            for number, part in (parts or {0: ()}).items()
        )

    async def append(self, run: str, stage: str, groups: Sequence[JournalGroup]) -> None:
        """See Queue. All or none of the groups of each shard."""
        parts = await self._by_shard(run, groups, lambda group: group.task)
        await all_of(
            self._shards[number].append(run, stage, part)
            for number, part in (parts or {0: ()}).items()
        )

    async def redo(self, run: str, stage: str, uids: Sequence[Uid]) -> int:
        """See Queue."""
        if not uids:
            return sum(await all_of(shard.redo(run, stage, ()) for shard in self._shards))
        parts = await self._by_shard(run, uids, _task_of_uid)
        return sum(
            await all_of(self._shards[n].redo(run, stage, part) for n, part in parts.items())
        )

    async def fail(
        self, run: str, stage: str, uid: Uid, token: int, outcome: Outcome, reason: str
    ) -> None:
        """See Queue."""
        [number] = await self._by_shard(run, [uid], _task_of_uid)
        await self._shards[number].fail(run, stage, uid, token, outcome, reason)

    async def release(self, run: str, stage: str, token_of: Mapping[Uid, int]) -> None:
        """See Queue."""
        parts = await self._by_shard(run, list(token_of), _task_of_uid)
        await all_of(
            self._shards[number].release(run, stage, {uid: token_of[uid] for uid in part})
            for number, part in parts.items()
        )

    # --- the trainer

    async def take(
        self, run: str, *, epoch: int, step: int, groups: int, batch_id: str, wait_s: float
    ) -> Batch:
        """See Queue, and taking.py. Groups of one shard stand together, in order."""
        taking = (await self._known(run)).taking
        return await taking.take(
            epoch=epoch, step=step, groups=groups, batch_id=batch_id, wait_s=wait_s
        )

    async def fetch_packed(
        self, run: str, groups: Sequence[Siblings], columns: Sequence[str]
    ) -> Sequence[PayloadGroup]:
        """See Queue. All shards send at the same time."""
        places = range(len(groups))
        parts = await self._by_shard(run, places, lambda place: groups[place].task)
        fetched = await all_of(
            self._shards[number].fetch_packed(run, [groups[place] for place in part], columns)
            for number, part in (parts or {0: ()}).items()
        )
        found = {
            place: group
            for part, payload in zip(parts.values(), fetched, strict=bool(parts))
            for place, group in zip(part, payload, strict=True)
        }
        return [found[place] for place in places]

    async def filter(self, run: str, *, epoch: int, uids: Sequence[Uid], reason: str) -> None:
        """See Queue."""
        parts = await self._by_shard(run, uids, _task_of_uid)
        await all_of(
            self._shards[number].filter(run, epoch=epoch, uids=part, reason=reason)
            for number, part in (parts or {0: ()}).items()
        )

    async def settle(self, run: str, *, epoch: int, step: int, batch_id: str) -> None:
        """See Queue."""
        await (await self._known(run)).taking.settle(epoch=epoch, step=step, batch_id=batch_id)

    async def commit(self, run: str, *, epoch: int, step: int) -> None:
        """See Queue."""
        await self._others_first(run, lambda shard: shard.commit(run, epoch=epoch, step=step))

    async def rewind(self, run: str, *, epoch: int, step: int) -> int:
        """See Queue."""
        (await self._known(run)).taking.plans.clear()
        rows = await self._others_first(
            run, lambda shard: shard.rewind(run, epoch=epoch, step=step)
        )
        return sum(rows)

    # --- the books

    async def ledger(self, run: str) -> Ledger:
        """See Queue: the sum of the shards' books."""
        return books.add(await all_of(shard.ledger(run) for shard in await self._on(run)))

    async def dead_letters(self, run: str) -> Sequence[DeadLetter]:
        """See Queue: shard after shard, each in the order in which they died."""
        told = await all_of(shard.dead_letters(run) for shard in await self._on(run))
        return [letter for letters in told for letter in letters]

    async def replay(self, run: str, uids: Sequence[Uid]) -> int:
        """See Queue."""
        parts = await self._by_shard(run, uids, _task_of_uid)
        return sum(
            await all_of(self._shards[number].replay(run, part) for number, part in parts.items())
        )

    async def why_waiting(self, run: str) -> Sequence[Waiting]:
        """See Queue; names the shard of what is not a call."""
        return books.merge(await all_of(shard.why_waiting(run) for shard in await self._on(run)))

    # --- where tasks are

    async def _by_shard(
        self, run: str, items: Sequence[Answer], task_of: Callable[[Answer], str]
    ) -> Mapping[int, Sequence[Answer]]:
        """`items` by the shard that has their task."""
        members = (await self._known(run)).members
        if not members.grown:
            return by_key((members.home(task_of(item)), item) for item in items)
        await self._locate(run, members, {task_of(item) for item in items})
        return by_key((self._places[run, task_of(item)], item) for item in items)

    async def _locate(self, run: str, members: Members, tasks: Iterable[str]) -> None:
        """Find tasks of a run with added shards: each is where it was admitted, which one shard knows."""
        unknown = [task for task in tasks if (run, task) not in self._places]
        if not unknown:
            return
        if len(self._places) > PLACES:
            self._places.clear()
            unknown = list(tasks)
        asked = by_key((number, task) for task in unknown for number in members.homes(task))
        rooms = await all_of(
            self._shards[number].room(run, tasks=part) for number, part in asked.items()
        )
        knows = {
            task: number for number, room in zip(asked, rooms, strict=True) for task in room.known
        }
        for task in unknown:
            self._places[run, task] = knows.get(task, members.home(task))


def _task_of_uid(uid: Uid) -> str:
    return uid.task
