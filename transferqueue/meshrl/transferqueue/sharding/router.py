"""Several queues as one: the port of contract/ports.py over shards.

    admit                  admission.py
    lease                  leases.py
    take, settle           batches.py
    ledger, why_waiting    merge.py
    write, fail, release, renew, fetch, filter, replay    the shard of each task
    publish, commit                                       every shard at once
    close_feed, rewind                                    every shard, shard 0 last
    acquire                                               shard 0 first, then the others

**Half-done calls are repaired by repeating them.** What goes to every shard is idempotent there. Shard 0 makes an
epoch and answers `run_state`; the others follow: a router that opens or acquires the run brings a shard that is
behind up to shard 0, its published version and its committed step too, so these go to all shards at once. A rewind,
which no shard follows, and a closed feed reach shard 0 last: what shard 0 says, every shard knows.

**Shards are added while runs go on**: see shard_list.py, and directory.py for how a router learns of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from meshrl.contract.errors import EndOfDataError, UserError
from meshrl.contract.held_rows import HeldLeases
from meshrl.contract.rows import RowMethods
from meshrl.contract.types import (
    Batch,
    DeadLetter,
    GroupRows,
    Lease,
    Ledger,
    Outcome,
    PackedGroup,
    PayloadGroup,
    ProgressGroup,
    RunSpec,
    RunState,
    Task,
    Uid,
    Version,
    Waiting,
)
from meshrl.transferqueue.sharding.admission import TURN_S, ShardedAdmission
from meshrl.transferqueue.sharding.directory import Dial, KnownRun, ShardDirectory
from meshrl.transferqueue.sharding.fan_out import all_of, any_of
from meshrl.transferqueue.sharding.leases import LAG_S, LeaseQuestion, ShardedLeases
from meshrl.transferqueue.sharding.merge import merged_waits, total_ledger
from meshrl.transferqueue.sharding.port import Shard
from meshrl.transferqueue.sharding.renewals import ShardedHeldLeases
from meshrl.transferqueue.sharding.run_shards import ShardsAdded

RENEW_S = 5.0
"""How long a renewal waits for a shard that restarts: the leases of the other shards must not end meanwhile."""


class ShardedQueue(RowMethods):
    """A Queue over shards. The order of `shards` must be the same for everybody, and new ones come last."""

    def __init__(
        self,
        shards: Sequence[Shard],
        addresses: Sequence[str] = (),
        dial: Dial | None = None,
        *,
        turn_s: float = TURN_S,
        lag_s: float = LAG_S,
    ) -> None:
        """`addresses` are those of `shards`; `dial` connects to added shards. Without them none can be added.

        The turn of a feeder ends after `turn_s`; a lease goes on without a shard that does not answer for `lag_s`.
        """
        if not shards:
            raise UserError("a queue needs at least one shard")
        self._directory = ShardDirectory(shards, addresses, dial)
        self._shards = self._directory.shards
        self._turn_s = turn_s
        self._leasing = ShardedLeases(
            self._shards, self._directory.watcher, self._granted, lag_s=lag_s
        )

    @property
    def num_shards(self) -> int:
        """How many shards there are, as far as is known."""
        return len(self._shards)

    async def close(self) -> None:
        """End what is under way; the shards are the caller's."""
        await self._directory.watcher.close()
        await self._leasing.close()

    async def add_shard(self, address: str) -> int:
        """Make the empty queue at `address` one more shard of all runs; returns its number. All routers learn of it.

        Raises:
            UserError: it is a shard already, holds runs, or not all shards were named. ConflictError: another shard
            was added at the same time. UnavailableError: nobody answers there.
        """
        return await self._directory.add_shard(address)

    async def addresses(self) -> Sequence[str]:
        """Where all shards are, by number."""
        return await self._directory.addresses()

    async def enrolled(self) -> int:
        """How many shards the list on shard 0 has; 0 where no shard was ever added to a running queue."""
        return await self._directory.enrolled()

    # --- runs

    async def open_run(self, spec: RunSpec) -> RunState:
        """See Queue. A run that is on fewer shards than there are goes on with all of them: new tasks only."""
        return await self._directory.open(spec)

    async def run_state(self, run: str) -> RunState:
        """See Queue."""
        return await self._shards[0].run_state(run)

    async def acquire(self, run: str, owner: str) -> RunState:
        """See Queue. Shard 0 makes the epoch; the others follow, also those that were added meanwhile."""
        known = await self._directory.known(run)
        first, *others = known.shards
        known.batches.plans.clear()
        state = await first.acquire(run, owner)
        await all_of(shard.follow(state, owner) for shard in others)
        if await self._directory.has_more_shards(known):
            await self._directory.catch_up(run)
        return state

    async def publish(self, run: str, version: Version) -> None:
        """See Queue."""
        await self._directory.broadcast(
            run,
            lambda shard: shard.publish(run, version),
            lambda first: first.publish_and_tell(run, version),
        )

    # --- the feeder

    async def admit(self, run: str, tasks: Sequence[Task], *, cursor: str, wait_s: float) -> int:
        """See Queue, and admission.py."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + wait_s

        async def admit(known: KnownRun) -> int:
            admission = ShardedAdmission(
                shards=known.shards,
                members=known.members,
                spec=known.spec,
                turn_s=self._turn_s,
            )
            return await admission.admit(tasks, cursor=cursor, wait_s=deadline - clock())

        return await self._directory.with_current_shards(run, admit)

    async def close_feed(self, run: str) -> None:
        """See Queue."""
        await self._directory.everywhere(run, lambda shard: shard.close_feed(run))

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
        """See Queue, and leases.py. Rows come oldest first from each shard; which shard is first changes."""
        if limit < 1 or not runs:
            raise UserError(f"a lease wants at least one row of at least one run, not {limit}")
        question = LeaseQuestion(
            runs=tuple(runs),
            stage=stage,
            worker=worker,
            limit=limit,
            at_least=min(limit, at_least),
            version=version,
        )
        clock = asyncio.get_running_loop().time
        deadline = clock() + wait_s
        while True:
            since = await self._directory.learned()
            known = await self._directory.open_ones(runs)
            specs = {run: one.spec for run, one in known.items()}
            try:
                return await self._leasing.lease(question, specs, deadline - clock(), since)
            except EndOfDataError:
                # Of the shards that were asked: rows may have come to others.
                grown = [
                    run for run, one in known.items() if await self._directory.has_more_shards(one)
                ]
                if not grown:
                    raise
                await self._directory.catch_up(grown[0])
            except ShardsAdded:
                for run, one in known.items():
                    state = await self._shards[0].run_state(run)
                    if not question.fresh(one.spec, state.epoch, state.published):
                        raise question.too_old(run, state.published) from None

    def _granted(self, number: int, lease: Lease) -> None:
        self._directory.handed_out(lease.run, (group.task for group in lease.groups), number)

    async def renew(self, run: str, stage: str, worker: str, uids: Sequence[Uid]) -> Sequence[Uid]:
        """See Queue. Of a shard that is away nothing is said to be lost: it will say so when it is back."""
        parts = await self._directory.by_shard(run, uids, _task_of_uid)
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

    async def renew_held(self, held_leases: HeldLeases) -> None:
        """See Queue, and renewals.py. A shard that is added is asked from then on."""
        while True:
            since = await self._directory.learned()
            sharded = ShardedHeldLeases(held_leases)
            renewals = [
                shard.renew_held(sharded.part(self._directory.has(number)))
                for number, shard in enumerate(self._shards)
            ]
            with suppress(ShardsAdded):
                return await any_of([*renewals, self._directory.watcher.until_shards_added(since)])

    async def write_packed(self, run: str, stage: str, groups: Sequence[PackedGroup]) -> None:
        """See Queue. All or none of the groups of each shard."""
        parts = await self._directory.by_shard(run, groups, lambda group: group.task)
        await all_of(
            self._shards[number].write_packed(run, stage, part)
            for number, part in (parts or {0: ()}).items()
        )

    async def append(self, run: str, stage: str, groups: Sequence[ProgressGroup]) -> None:
        """See Queue. All or none of the groups of each shard."""
        parts = await self._directory.by_shard(run, groups, lambda group: group.task)
        await all_of(
            self._shards[number].append(run, stage, part)
            for number, part in (parts or {0: ()}).items()
        )

    async def redo(self, run: str, stage: str, uids: Sequence[Uid]) -> int:
        """See Queue."""
        if not uids:
            return sum(await all_of(shard.redo(run, stage, ()) for shard in self._shards))
        parts = await self._directory.by_shard(run, uids, _task_of_uid)
        return sum(
            await all_of(self._shards[n].redo(run, stage, part) for n, part in parts.items())
        )

    async def fail(
        self, run: str, stage: str, uid: Uid, token: int, outcome: Outcome, reason: str
    ) -> None:
        """See Queue."""
        [number] = await self._directory.by_shard(run, [uid], _task_of_uid)
        await self._shards[number].fail(run, stage, uid, token, outcome, reason)

    async def release(self, run: str, stage: str, token_of: Mapping[Uid, int]) -> None:
        """See Queue."""
        parts = await self._directory.by_shard(run, list(token_of), _task_of_uid)
        await all_of(
            self._shards[number].release(run, stage, {uid: token_of[uid] for uid in part})
            for number, part in parts.items()
        )

    # --- the trainer

    async def take(
        self, run: str, *, epoch: int, step: int, groups: int, batch_id: str, wait_s: float
    ) -> Batch:
        """See Queue, and batches.py. GroupCounts of one shard stand together, in order."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + wait_s

        async def take(known: KnownRun) -> Batch:
            batch, parts = await known.batches.take(
                epoch=epoch, step=step, groups=groups, batch_id=batch_id, wait_s=deadline - clock()
            )
            for number, part in parts.items():
                self._directory.handed_out(run, (group.task for group in part), number)
            return batch

        return await self._directory.with_current_shards(run, take)

    async def fetch_packed(
        self, run: str, groups: Sequence[GroupRows], columns: Sequence[str]
    ) -> Sequence[PayloadGroup]:
        """See Queue. All shards send at the same time."""
        places = range(len(groups))

        async def fetch(parts: Mapping[int, Sequence[int]]) -> Sequence[PayloadGroup]:
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

        return await self._directory.routed(run, places, lambda place: groups[place].task, fetch)

    async def filter(self, run: str, *, epoch: int, uids: Sequence[Uid], reason: str) -> None:
        """See Queue."""
        parts = await self._directory.by_shard(run, uids, _task_of_uid)
        await all_of(
            self._shards[number].filter(run, epoch=epoch, uids=part, reason=reason)
            for number, part in (parts or {0: ()}).items()
        )

    async def settle(self, run: str, *, epoch: int, step: int, batch_id: str) -> None:
        """See Queue."""
        await self._directory.with_current_shards(
            run, lambda known: known.batches.settle(epoch=epoch, step=step, batch_id=batch_id)
        )

    async def commit(self, run: str, *, epoch: int, step: int) -> None:
        """See Queue."""
        await self._directory.broadcast(
            run,
            lambda shard: shard.commit(run, epoch=epoch, step=step),
            lambda first: first.commit_and_tell(run, epoch=epoch, step=step),
        )

    async def rewind(self, run: str, *, epoch: int, step: int) -> int:
        """See Queue."""
        (await self._directory.known(run)).batches.plans.clear()
        rows = 0

        async def rewind(shard: Shard) -> None:
            nonlocal rows
            count = await shard.rewind(run, epoch=epoch, step=step)
            rows += count

        await self._directory.everywhere(run, rewind)
        return rows

    # --- ledger and waits

    async def ledger(self, run: str) -> Ledger:
        """See Queue: the sum of the shards' ledgers."""
        return total_ledger(await self._directory.everywhere(run, lambda shard: shard.ledger(run)))

    async def dead_letters(self, run: str) -> Sequence[DeadLetter]:
        """See Queue: shard after shard, each in the order in which they died."""
        answers = await self._directory.everywhere(run, lambda shard: shard.dead_letters(run))
        return [letter for letters in answers for letter in letters]

    async def replay(self, run: str, uids: Sequence[Uid]) -> int:
        """See Queue."""
        parts = await self._directory.by_shard(run, uids, _task_of_uid)
        return sum(
            await all_of(self._shards[number].replay(run, part) for number, part in parts.items())
        )

    async def why_waiting(self, run: str) -> Sequence[Waiting]:
        """See Queue; names the shard of what is not a call."""
        return merged_waits(
            await self._directory.everywhere(run, lambda shard: shard.why_waiting(run))
        )


def _task_of_uid(uid: Uid) -> str:
    return uid.task
