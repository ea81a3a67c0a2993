"""Takes batches from several shards, by a plan (shard.py) that is recorded with the groups of each shard.

    shards count their complete groups ──▶ enough? ──▶ plan ──▶ shard 0 takes its share under it, then the others

**Exactly once, whatever dies.** A group that is complete and fresh enough for a step stays so until it is taken, so
the shares of a plan can always be taken. Shard 0 records its share first, empty or not, and with it the plan. Ranks
that ask for one batch at the same time and planned differently get the recorded plan. A caller that asks for the
batch again, before or after a kill, follows it too, and a shard that has given its share gives the same one again.
Shares of an older epoch that were not settled come back at `acquire`, as from a single queue. Shard 0 also says
which shards the run is on, so that no plan, and no end of data, misses shards that were added.

**Order.** Groups that were taken before are taken first: by the round that first took them, then by shard, then in
their old order there. That is the order in which they stood, so a rewound trainer gets the same batches. New groups
are taken in even shares, each shard's in its sampler's order; where one shard has fewer, the others give more. So
batches are in order of admission (or of the sampler) on each shard, and approximately so over all.

**Slow tasks.** Groups that the next batch would get too late are counted over all shards (operations/window.py). They
are waited for, the shares are large enough for them, and they come first in each.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshrl.contract.errors import ConflictError, EndOfDataError, UserError, WaitTimeoutError
from meshrl.contract.types import Batch, BatchGroup
from meshrl.transferqueue.operations import window
from meshrl.transferqueue.operations.why_waiting import DUE
from meshrl.transferqueue.sharding.fan_out import all_of, any_of
from meshrl.transferqueue.sharding.port import GroupCounts, Shard
from meshrl.transferqueue.sharding.run_shards import RunShards, ShardsAdded
from meshrl.transferqueue.sharding.shard import BatchPlan
from meshrl.transferqueue.sharding.watcher import ShardWatcher

PLANS = 64
"""Plans that a router remembers; older ones are asked for again."""


def plan_batch(counts: Sequence[GroupCounts], count: int, step: int) -> BatchPlan:
    """`count` groups, or all if there are fewer. Which shard gives one new group more changes with `step`."""
    due_by, least = _due_by_shard(counts, count, step)
    runs: list[tuple[int, int]] = []
    left = count
    for round_ in sorted({at for one in counts for at, _ in one.replays}):
        for shard, one in enumerate(counts):
            groups = min(left, dict(one.replays).get(round_, 0))
            runs.append((shard, groups))
            left -= groups
    fresh = [0] * len(counts)
    turns = _turns(counts, step)
    for shard in turns:
        replays = sum(groups for at, groups in runs if at == shard)
        fresh[shard] = max(0, min(least[shard] - replays, counts[shard].fresh, left))
        left -= fresh[shard]
    while left and any(one.fresh > given for one, given in zip(counts, fresh, strict=True)):
        more = [shard for shard in turns if fresh[shard] < counts[shard].fresh]
        fresh[min(more, key=fresh.__getitem__)] += 1
        left -= 1
    return BatchPlan.of(max(one.next_round for one in counts), [*runs, *enumerate(fresh)], due_by)


def _turns(counts: Sequence[GroupCounts], step: int) -> list[int]:
    return [(step + turn) % len(counts) for turn in range(len(counts))]


def _due_by_shard(counts: Sequence[GroupCounts], count: int, step: int) -> tuple[int, list[int]]:
    """The step by which groups are due (negative: none are), and how many of them each shard gives at least."""
    due_by, least = -1, [0] * len(counts)
    for due_by, wanted, _ in window.due(_together(counts), count):
        complete = [
            sum(each.complete for each in one.sampled if each.first <= due_by) for one in counts
        ]
        while sum(least) < wanted:
            more = [shard for shard in _turns(counts, step) if least[shard] < complete[shard]]
            if not more:
                break
            least[min(more, key=least.__getitem__)] += 1
    return due_by, least


def _together(counts: Sequence[GroupCounts]) -> list[window.Sampled]:
    return window.together(one.sampled for one in counts)


def _lacking(counts: Sequence[GroupCounts], count: int) -> tuple[int, int]:
    """The step by which the most groups are due that are not complete, and how many they are; see `due_groups`."""
    replays = sum(groups for one in counts for _, groups in one.replays)
    if replays >= count or not any(one.waits_for_due for one in counts):
        return -1, 0
    return window.most_lacking(_together(counts), count)


class BatchRequest(NamedTuple):
    """The batch that is asked for."""

    epoch: int
    step: int
    groups: int
    batch_id: str


@dataclass(slots=True, eq=False)
class ShardedBatches:
    """One run's batches."""

    run: str
    shards: Sequence[Shard]
    members: RunShards
    watcher: ShardWatcher
    since: str
    """The shard list that was known when this was made, as written."""
    plans: OrderedDict[str, BatchPlan] = field(default_factory=OrderedDict)
    """Of batches whose shares are all taken."""
    planning: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from the counts of the shards until the batch is taken, so that no two plans use the same groups; never
    held
    while waiting for rows."""

    async def take(
        self, *, epoch: int, step: int, groups: int, batch_id: str, wait_s: float
    ) -> tuple[Batch, Mapping[int, Sequence[BatchGroup]]]:
        """See Queue; also which shard gave which groups. Raises ShardsAdded.

        A shard answers again when it has its share of the missing groups: when enough groups are complete, one
        shard does. Where enough are and some that are due are not, the shard answers that gets one of these.
        """
        if groups < 1 or not batch_id:
            raise UserError(f"take wants at least one group and a batch_id, not {groups} groups")
        clock = asyncio.get_running_loop().time
        deadline = clock() + max(0.0, wait_s)
        request = BatchRequest(epoch, step, groups, batch_id)
        asked = request._asdict()
        while True:
            counts: Sequence[GroupCounts] = ()
            async with self.planning:
                plan = self.plans.get(batch_id)
                if plan is None:
                    counts = await all_of(shard.groups(self.run, **asked) for shard in self.shards)
                    plan = self._plan(counts, request)
                if plan is not None:
                    plan, first = await self._record(plan, request)
                    with suppress(WaitTimeoutError):
                        return await self._taken(plan, first, request)
            left = deadline - clock()
            if plan is not None:
                # There is no other plan to be made: rows of a share that are being done again are waited for.
                return await self._taken(plan, first, request, max(0.0, left))
            why = self._why(counts, request)
            if left <= 0:
                raise WaitTimeoutError(f"timed out waiting for {why}")
            lacking = groups - sum(one.complete for one in counts)
            share = -(-lacking // len(counts))
            due_by = _lacking(counts, groups)[0] if lacking <= 0 else -1
            questions = (
                shard.groups(
                    self.run,
                    **asked,
                    more_than=one.complete + share - 1 if lacking > 0 else groups,
                    done=one.done,
                    due_by=due_by,
                    unfinished=window.unfinished(one.sampled, due_by),
                    why=why,
                    wait_s=left,
                )
                for shard, one in zip(self.shards, counts, strict=True)
            )
            await any_of([*questions, self.watcher.until_shards_added(self.since)])

    def _plan(self, counts: Sequence[GroupCounts], request: BatchRequest) -> BatchPlan | None:
        """The plan on record, or a new one if there are enough groups.

        Raises:
            EndOfDataError. ShardsAdded: the run is on more shards.
        """
        self.members.check(counts[0].members)
        recorded = next((one.plan for one in counts if one.plan), "")
        if recorded:
            return BatchPlan.parse(recorded)
        complete = sum(one.complete for one in counts)
        done = all(one.done for one in counts)
        if complete >= request.groups and not done and _lacking(counts, request.groups)[1]:
            return None
        if complete >= request.groups or (done and complete):
            return plan_batch(counts, request.groups, request.step)
        if done:
            raise EndOfDataError(
                f"run {self.run}: the feed is closed and every group is taken or has left"
            )
        return None

    async def _record(self, plan: BatchPlan, request: BatchRequest) -> tuple[BatchPlan, Batch]:
        """The plan that shard 0 has on record, this one or another's, and its share. Raises ShardsAdded."""
        try:
            return plan, await self._share(0, plan, request)
        except ConflictError as error:
            if "plan" not in error.details:
                raise
            plan = BatchPlan.parse(error.details["plan"])
            return plan, await self._share(0, plan, request)

    async def _taken(
        self, plan: BatchPlan, first: Batch, request: BatchRequest, wait_s: float = 0.0
    ) -> tuple[Batch, Mapping[int, Sequence[BatchGroup]]]:
        """The batch: shard 0's share and those of the others. Raises WaitTimeoutError where rows are lacking."""
        others = [shard for shard in self._shares(plan) if shard]
        parts = await all_of(self._share(shard, plan, request, wait_s) for shard in others)
        self._keep(request.batch_id, plan)
        taken = {0: first.groups}
        taken.update((shard, part.groups) for shard, part in zip(others, parts, strict=True))
        in_order = plan.in_order(taken)
        batch = Batch(batch_id=request.batch_id, run=self.run, step=request.step, groups=in_order)
        return batch, taken

    def _share(
        self, shard: int, plan: BatchPlan, request: BatchRequest, wait_s: float = 0.0
    ) -> Coroutine[Any, Any, Batch]:
        share = request._replace(
            groups=self._shares(plan)[shard], batch_id=plan.name(request.batch_id)
        )
        return self.shards[shard].take(self.run, **share._asdict(), wait_s=wait_s)

    async def settle(self, *, epoch: int, step: int, batch_id: str) -> None:
        """See Queue."""
        plan = self.plans.get(batch_id) or await self._recorded(batch_id)
        if plan is None:
            # Committed long ago, or nobody's: a shard by itself knows what to say.
            await self.shards[0].settle(self.run, epoch=epoch, step=step, batch_id=batch_id)
            return
        await all_of(
            self.shards[shard].settle(
                self.run, epoch=epoch, step=step, batch_id=plan.name(batch_id)
            )
            for shard in self._shares(plan)
        )

    def _shares(self, plan: BatchPlan) -> Mapping[int, int]:
        """Raises ShardsAdded when the plan was made by somebody who knew of more shards."""
        if any(shard >= len(self.shards) for shard, _ in plan.runs):
            raise ShardsAdded
        return plan.shares

    async def _recorded(self, batch_id: str) -> BatchPlan | None:
        plans = await all_of(shard.plan_of(self.run, batch_id) for shard in self.shards)
        return next((BatchPlan.parse(plan) for plan in plans if plan), None)

    def _keep(self, batch_id: str, plan: BatchPlan) -> None:
        self.plans[batch_id] = plan
        while len(self.plans) > PLANS:
            self.plans.popitem(last=False)

    @staticmethod
    def _why(counts: Sequence[GroupCounts], request: BatchRequest) -> str:
        complete = sum(one.complete for one in counts)
        open_groups = complete + sum(one.unfinished for one in counts)
        feeds = "closed" if all(one.feed_closed for one in counts) else "open"
        shards = ", ".join(str(one.complete) for one in counts)
        lacking = _lacking(counts, request.groups)[1] if complete >= request.groups else 0
        due = f"; {lacking} that are not {DUE}" if lacking else ""
        return (
            f"{request.groups} complete groups for step {request.step}: {complete} are (by shard: {shards}),"
            f" of {open_groups} open{due}; the feed is {feeds}"
        )
