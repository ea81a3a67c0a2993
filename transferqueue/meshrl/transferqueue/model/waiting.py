"""Rows that wait to be leased, groups that wait to be taken, and leases that wait to expire.

No scans and no polling: rows and groups are kept in order as they come and go, and one timer serves all leases.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from meshrl.transferqueue.model.group import Grant, Group, count_sampled, lowest
from meshrl.transferqueue.sampling import CompleteGroup, OrderedNumbers, Sampler

CLAIM_S = 2.0
"""How long the rest of a group is kept for the worker that has its siblings, if others have other rows to lease."""


class ReadyRows:
    """The rows of one stage: highest task priority first, then oldest group, then index, so siblings come together.

    A worker that got a part of a group has the prompt in its cache: for CLAIM_S the other workers skip the
    rest, unless there is nothing else for them.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        """(-priority, group number): one entry per group of `_queued`; one without rows is dropped at the top."""
        self._queued: set[int] = set()
        self._rows: dict[int, tuple[Group, int]] = {}
        """The group and the mask of its ready rows, by group number."""
        self.count = 0
        """Number of ready rows."""
        self._claims: dict[int, tuple[str, float]] = {}
        """The worker that has siblings of the rows, and until when the rest is reserved for it, by group number."""

    def set(self, group: Group, mask: int) -> bool:
        """Exactly the rows in `mask` of this group are ready; returns True if some were not before. O(log groups)."""
        number = group.number
        entry = self._rows.get(number)
        old = entry[1] if entry else 0
        if mask == old:
            return False
        self.count += mask.bit_count() - old.bit_count()
        came = bool(mask & ~old)
        if came or not mask:
            # Rows that came back may go to any worker.
            self._claims.pop(number, None)
        if not mask:
            self._rows.pop(number, None)
            return False
        self._rows[number] = (group, mask)
        if number not in self._queued:
            self._queued.add(number)
            heapq.heappush(self._heap, (-group.metadata.priority, number))
        return came

    def pop(self, limit: int, worker: str = "", now: float = 0.0) -> list[tuple[Group, int]]:
        """Remove and return at most `limit` rows in order, for `worker`. O(groups visited x log groups)."""
        popped: list[tuple[Group, int]] = []
        others: list[tuple[int, int]] = []
        while limit > 0 and self._heap:
            number = self._heap[0][1]
            claim = self._claims.get(number)
            if number not in self._rows:
                self._queued.discard(heapq.heappop(self._heap)[1])
            elif claim is not None and claim[0] != worker and now < claim[1]:
                others.append(heapq.heappop(self._heap))
            else:
                limit -= self._take(number, limit, worker, now, popped)
        for entry in others:
            heapq.heappush(self._heap, entry)
        for _, number in others:
            if limit > 0:
                limit -= self._take(number, limit, worker, now, popped)
        return popped

    def _take(
        self, number: int, limit: int, worker: str, now: float, popped: list[tuple[Group, int]]
    ) -> int:
        """Move up to `limit` rows of one group to `popped`; returns how many."""
        group, mask = self._rows[number]
        taken = lowest(mask, limit)
        popped.append((group, taken))
        self.set(group, mask & ~taken)
        if mask & ~taken and self._claims.get(number, ("", 0.0))[0] != worker:
            self._claims[number] = (worker, now + CLAIM_S)
        return taken.bit_count()


class CompleteGroups:
    """Groups that were taken before come first, in their old order; then those of the sampler, in its order."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._taken_before = OrderedNumbers()
        """Group numbers in the order of all takes."""
        self._count = 0
        self.sampled_from: Final[Counter[int]] = Counter()
        """The groups by the step from which they were sampled."""

    def __len__(self) -> int:
        return self._count

    def add(self, group: Group) -> None:
        """Add a group that became complete and is in no batch."""
        group.complete = True
        self._count += 1
        count_sampled(self.sampled_from, group, 1)
        if group.position >= 0:
            self._taken_before.put(group.number, (group.position,))
            return
        facts = group.facts_of(group.finished)
        _, num_tokens, oldest, newest, *_ = zip(*facts, strict=True)
        self._sampler.add(
            CompleteGroup(
                number=group.number,
                task_id=group.task_id,
                priority=group.metadata.priority,
                data_source=group.metadata.data_source,
                difficulty=group.metadata.difficulty,
                num_tokens=num_tokens,
                oldest=min(oldest),
                newest=max(newest),
            )
        )

    def discard(self, group: Group) -> None:
        """Discard the group, if it is here: it was taken, left or is no longer complete."""
        if group.complete:
            group.complete = False
            self._count -= 1
            count_sampled(self.sampled_from, group, -1)
            self._sampler.discard(group.number)
            self._taken_before.discard(group.number)

    @property
    def taken_before(self) -> int:
        """Groups that come first, since a take that is repeated follows the one before."""
        return len(self._taken_before)

    def first(self, count: int) -> list[int]:
        """The numbers of the next `count` groups in order (fewer if there are fewer); they stay."""
        numbers = self._taken_before.first(count)
        if len(numbers) < count:
            numbers += self._sampler.first(count - len(numbers))
        return numbers


class Sampled(NamedTuple):
    """The groups that are in no batch and are sampled from one version on, while they are fresh enough for a step."""

    first: int
    """The version's step."""
    later: int
    """Groups that fit into the batches after that step's which still come in time for them."""
    groups: int
    complete: int
    """How many of `groups` a take could get."""


def sampled_by(group: Group, step: int) -> bool:
    """True if the group is sampled from `step` or an earlier one on."""
    return first_version(group) <= step


def first_version(group: Group) -> float:
    """The published step when its first row was granted."""
    return math.inf if group.sampled_from is None else group.sampled_from


def due(sampled: Sequence[Sampled], count: int) -> Iterator[tuple[int, int, int]]:
    """How many of the groups that are sampled from `first` or earlier on must be in a batch of `count` groups.

    `sampled` is in the order of `first`. Yields (first, groups, how many of those are not complete).
    """
    groups = complete = 0
    for one in sampled:
        groups += one.groups
        complete += one.complete
        if (wanted := min(groups - one.later, count)) > 0:
            yield one.first, wanted, max(0, wanted - complete)


def most_lacking(sampled: Sequence[Sampled], count: int) -> tuple[int, int]:
    """The `first` of `due` for which the most groups are not complete, and how many; (-1, 0): all are."""
    lacking = [(first, groups) for first, _, groups in due(sampled, count) if groups]
    return max(lacking, key=lambda each: each[1], default=(-1, 0))


TICK_S = 0.25
"""The longest time between two ticks while leases are out."""
FINEST_TICK_S = 0.01
"""The shortest time between two ticks: deadlines are no more exact than this."""
SWEPT_GRANTS = 256
"""Grants in the heap, up to which those that have ended are not swept out."""
RETURN_S = 2.0
"""A worker whose connection broke must renew within this time. One that lives does at once, one that died never."""


class Expiry:
    """One timer for all leases, on a clock of its own: seconds in which the queue could receive renewals.

    The timer ticks while leases are out. A tick that comes late advances the clock only by the time that was planned
    for it. So time in which this process was stopped, swapped out or starved expires no lease: the renewals of that
    time are read before the clock has advanced far.

    A renewal only moves `grant.deadline`. The heap's entry is compared with it when it reaches the top, so a renewal
    costs nothing here. Ended grants are swept out before they outnumber the others: a fast run ends thousands in the
    time to live of one lease, and each would keep its group in memory until then.
    """

    def __init__(self, expired: Callable[[Grant], None]) -> None:
        self._expired = expired
        self._heap: list[tuple[float, int, Grant]] = []
        self._by_worker: defaultdict[str, list[Grant]] = defaultdict(list)
        """Grants that `watch` was given since the last sweep or that the sweep kept, by worker."""
        self._watched = 0
        """The entries of `_by_worker`."""
        self._sweep_at = SWEPT_GRANTS
        self._numbers = itertools.count()
        self._timer: asyncio.Handle | None = None
        self._clock_s = 0.0
        self._read_at = 0.0
        self._tick_s = TICK_S
        self._stopped = False

    def now(self) -> float:
        """Seconds in which the queue could receive renewals; the clock of all deadlines."""
        at = asyncio.get_running_loop().time()
        self._clock_s += min(at - self._read_at, self._tick_s)
        self._read_at = at
        return self._clock_s

    def watch(self, grant: Grant) -> None:
        """Call `expired(grant)` when its deadline passes, unless it has ended by then."""
        self._by_worker[grant.worker].append(grant)
        self._watched += 1
        self._push(grant)
        if self._watched > self._sweep_at:
            self._sweep()
        self._arm()

    def hasten(self, worker: str, before: float, concerns: Callable[[Grant], bool]) -> None:
        """Let grants of `worker` up to `before` (loop time) expire soon unless it renews: its connection broke.

        Those which the connection `concerns`. O(grants of this worker): a fleet that loses its network breaks all
        connections at once.
        """
        deadline = self.now() + RETURN_S
        for grant in self._by_worker.get(worker, ()):
            held = grant.mask and grant.since <= before and deadline < grant.deadline
            if held and concerns(grant):
                grant.deadline = deadline
                self._push(grant)
        self._arm()

    def stop(self) -> None:
        """Expire no lease any more: from now on the queue cannot receive renewals."""
        self._stopped = True
        self._disarm()

    def clear(self) -> None:
        """Forget every grant."""
        self._heap.clear()
        self._by_worker.clear()
        self._watched = 0
        self._disarm()

    def _sweep(self) -> None:
        """Drop the grants that ended; O(1) for each grant that was added since the last sweep."""
        self._heap = [entry for entry in self._heap if entry[2].mask]
        heapq.heapify(self._heap)
        for worker, grants in list(self._by_worker.items()):
            self._by_worker[worker] = kept = [grant for grant in grants if grant.mask]
            if not kept:
                del self._by_worker[worker]
        self._watched = sum(map(len, self._by_worker.values()))
        self._sweep_at = max(SWEPT_GRANTS, 2 * self._watched)

    def _push(self, grant: Grant) -> None:
        heapq.heappush(self._heap, (grant.deadline, next(self._numbers), grant))

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is None and self._heap and not self._stopped:
            left = self._heap[0][0] - self.now()
            self._tick_s = min(TICK_S, max(FINEST_TICK_S, left / 2))
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self.now()
        while self._heap and self._heap[0][0] <= now:
            _, _, grant = heapq.heappop(self._heap)
            if not grant.mask:
                continue
            if grant.deadline > now:
                # It was renewed since this entry was made.
                self._push(grant)
            else:
                self._expired(grant)
        self._arm()
