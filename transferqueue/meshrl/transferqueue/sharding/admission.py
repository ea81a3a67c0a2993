"""Admission over several shards: credits are counted over all of them, then spent where each task lives.

    turn begins on shard 0 once the one before it is over, then on every other shard; each tells its open groups and
    the tasks it knows
      └▶ capacity = limit - sum of open groups; the longest prefix of unknown tasks that fits
           └▶ admitted on their shards under this turn ──▶ shard 0 last, with the cursor

**The bound is exact.** Let `limit = (max_staleness + 1) x batch_groups` (see ../operations/lifecycle.py). A shard
admits under a turn only while no other turn has begun there, and a turn admits only after it has begun on *every*
shard. So of two turns one has, on each shard where it admitted, done so before the other read the number of open
groups: the other has counted it. Hence open groups over all shards never exceed `limit` by admission. What else
opens groups (a rewind, a replay) does so without asking, on one queue as on several. A group that leaves is no
longer counted: credits are stored nowhere, so no restart can leak one.

**Turns queue up** at shard 0, so that feeders do not fence each other for ever. A turn is over with its
admission on shard 0, which is its last; that of a feeder that died is over after `turn_s`.

**A shard that is added** is noted on shard 0. A turn that begins there with fewer shards is refused, so every turn
has counted every shard that anybody admitted to before; a turn that began earlier is fenced by the first one over
more shards as by any other.

**Staleness** does not depend on it: in `take` each shard drops a group that is too old for a step, and it leases
rollout rows only to engines that are fresh enough, as a single queue does.

**The cursor** is on shard 0 and moves in the last transaction of a call, once every other shard has made its tasks
durable. A kill before that leaves tasks ahead of the cursor, which the feeder repeats and their shards know.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from meshrl.contract.errors import ConflictError, FencedError, WaitTimeoutError
from meshrl.contract.types import RunSpec, Task
from meshrl.transferqueue.operations import lifecycle
from meshrl.transferqueue.sharding.fan_out import all_of, any_of, by_key
from meshrl.transferqueue.sharding.port import RowCounts, Shard, ShardCapacity
from meshrl.transferqueue.sharding.run_shards import RunShards, ShardsAdded

TURN_S = 2.0
"""A turn that lasts longer is ended: its feeder is slow or dead, and if it comes back it is fenced."""


def free(
    spec: RunSpec,
    counts: Sequence[ShardCapacity] | Sequence[RowCounts],
    groups: int = 0,
    size: int = 0,
) -> int:
    """Groups that may come in now (`lifecycle.free_groups`, over all shards), beside `groups` of `size` bytes."""
    limit = spec.admission_groups
    if sum(one.open_bytes for one in counts) + size >= spec.resident_bytes:
        limit = min(limit, spec.batch_groups)
    return max(0, math.floor(limit) - groups - sum(one.open_groups for one in counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedAdmission:
    """One run's lifecycle."""

    shards: Sequence[Shard]
    members: RunShards
    spec: RunSpec
    turn_s: float = TURN_S
    """How long the turn of another feeder may last."""

    async def admit(self, tasks: Sequence[Task], *, cursor: str, wait_s: float) -> int:
        """See Queue. Raises ShardsAdded."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + max(0.0, wait_s)
        asked = self._tasks_by_shard(tasks)
        while True:
            turn = uuid.uuid4().hex
            capacities = await self._begin(turn, asked)
            prefix, new = self._fitting(tasks, capacities)
            try:
                admitted = await self._spend(tasks[:prefix], new, turn, cursor, len(tasks))
            except FencedError:
                continue  # another turn has begun: count again, with what it admitted
            if admitted or not tasks:
                return admitted
            if not prefix:
                await self._until_capacity(capacities, deadline - clock())

    async def _begin(self, turn: str, asked: Mapping[int, Sequence[str]]) -> list[ShardCapacity]:
        """Begin the turn on every shard; returns their capacities. Raises ShardsAdded."""
        first, *others = self.shards
        run = self.spec.run
        known = asked.get(0, ())
        capacity = await first.capacity(run, turn=turn, tasks=known, wait_s=self.turn_s)
        try:
            self.members.check(capacity.members)
        except ShardsAdded:
            with suppress(FencedError):
                await first.admit_in_turn(run, [], cursor=None, turn=turn)
            raise
        capacities = await all_of(
            shard.capacity(run, turn=turn, tasks=asked.get(number, ()))
            for number, shard in enumerate(others, start=1)
        )
        return [capacity, *capacities]

    def _tasks_by_shard(self, tasks: Sequence[Task]) -> Mapping[int, Sequence[str]]:
        """Which shards may know which tasks."""
        return by_key(
            (number, task.task_id) for task in tasks for number in self.members.homes(task.task_id)
        )

    def _fitting(
        self, tasks: Sequence[Task], capacities: Sequence[ShardCapacity]
    ) -> tuple[int, list[Task]]:
        """How many of the first tasks can be in after this call, and which of them are new.

        Raises:
            UserError: a task can never be answered. ConflictError: the feed is closed and a task is unknown.
        """
        known = set().union(*(capacity.known for capacity in capacities))
        packed = lifecycle.packed(self.spec, known, tasks)
        new: dict[str, Task] = {}
        size = 0
        for count, task in enumerate(tasks):
            if task.task_id not in packed or task.task_id in new:
                continue
            if any(capacity.feed_closed for capacity in capacities):
                raise ConflictError(
                    f"run {self.spec.run}: the feed is closed, {task.task_id} is too late"
                )
            if not free(self.spec, capacities, len(new), size):
                return count, list(new.values())
            new[task.task_id] = task
            size += len(packed[task.task_id].data)
        return len(tasks), list(new.values())

    async def _spend(
        self, prefix: Sequence[Task], new: Sequence[Task], turn: str, cursor: str, wanted: int
    ) -> int:
        """Admit the new tasks where they live, shard 0 last, which ends the turn; how much of the prefix is in.

        Raises:
            FencedError: another turn has begun meanwhile.
        """
        run = self.spec.run
        parts = by_key((self.members.home(task.task_id), task) for task in new)
        others = [number for number in parts if number]
        counts = await all_of(
            self.shards[number].admit_in_turn(run, parts[number], cursor=None, turn=turn)
            for number in others
        )
        missing = [
            task
            for number, count in zip(others, counts, strict=True)
            for task in parts[number][count:]
        ]
        last = parts.get(0, ())
        moved = cursor if len(prefix) == wanted and not missing else None
        count = await self.shards[0].admit_in_turn(run, last, cursor=moved, turn=turn)
        missing += last[count:]
        lost = {task.task_id for task in missing}
        return next(
            (count for count, task in enumerate(prefix) if task.task_id in lost), len(prefix)
        )

    async def _until_capacity(self, capacities: Sequence[ShardCapacity], wait_s: float) -> None:
        """Wait until a group leaves or is consumed anywhere. Raises WaitTimeoutError."""
        spec = self.spec
        why = (
            f"room: {sum(one.open_groups for one in capacities)} of {spec.admission_groups:g} groups are admitted"
            f" and not consumed on {len(capacities)} shards,"
            f" {sum(one.open_bytes for one in capacities)} of {spec.resident_bytes} bytes"
        )
        if wait_s <= 0:
            raise WaitTimeoutError(f"timed out waiting for {why}")
        await any_of(
            shard.capacity(spec.run, fewer_than=capacity.open_groups, why=why, wait_s=wait_s)
            for shard, capacity in zip(self.shards, capacities, strict=True)
        )
