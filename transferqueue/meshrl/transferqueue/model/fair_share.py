"""How many rows each worker of the sampling stage gets while there are fewer than slots."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from meshrl.transferqueue.signals import Signal

WEIGHT = 0.1
"""The weight of the newest row in the moving average of speeds."""

BETWEEN_S = 2.0
"""A worker without rows counts until so long after its last call: a publish ends its wait, and it asks again."""

PACES: Final = 1 << 20
"""Speeds are summed as whole numbers of 1 / PACES tokens per second: sums that many changes leave exact."""


@dataclass(slots=True, eq=False)
class _Sharer:
    """One worker in the division; a worker that changed has another one."""

    pace: int
    slots: int
    rows: int
    full: bool = False
    """Its share is all its slots."""
    gone: bool = False


@dataclass(slots=True, eq=False)
class Holder:
    """One worker's state, as far as its leases show it."""

    name: str = ""
    rows: int = 0
    """Rows that it holds."""
    slots: int = 0
    """Rows that it held when it last asked, plus those that it asked for."""
    speed: float = 0.0
    """Tokens per second of one row; 0 before it has finished its first one."""
    seen: float = 0.0
    """When it last asked, renewed or stopped waiting."""
    waiting: int = 0
    """Leases that it waits for."""
    wrote: Signal = field(default_factory=Signal)
    """Signalled when it holds fewer rows than before: its share may allow others."""
    part: _Sharer | None = None
    """None while it does not count."""
    look_at: float = math.inf
    """When time alone may change whether it counts."""
    changed: dict[Holder, None] = field(default_factory=dict, repr=False)
    """The set of changed holders, shared by all; a holder adds itself to it."""

    def hold(self, change: int) -> None:
        """Add `change` to the rows that it holds."""
        self.rows += change
        self.changed[self] = None

    def finished(self, tokens: Sequence[int], seconds: float) -> None:
        """Measure its speed by rows of `tokens` each, written `seconds` after they were granted."""
        took = max(seconds, 1e-3)
        for of_row in tokens:
            self.speed += (of_row / took - self.speed) * (WEIGHT if self.speed else 1.0)
        self.changed[self] = None


class FairShare:
    """The workers of one stage: divides the rows at the end of a batch so that all finish at about the same time.

    A slow worker that leases as many rows as it has slots finishes last, with rows that faster workers could have
    sampled. So the rows that are leased or ready are divided in proportion to measured speed, up to each worker's
    slots (water-filling), and no worker is granted more than its share. While there are rows for all slots, nothing
    is limited.

    Speed is the tokens per second of one *row*, not of the worker: a worker with few rows does not look slower, and
    one with many rows looks slower than it is, so the division converges to one where all finish together.

    The sums and the division are kept from call to call: a call looks at the workers that changed since the last one.
    """

    def __init__(self) -> None:
        self._holders: dict[str, Holder] = {}
        self._changed: dict[Holder, None] = {}
        self._looks: list[tuple[float, int, Holder]] = []
        """Heap of the times after which a worker may count no longer."""
        self._number = itertools.count()
        self._division = Division()

    def holder(self, worker: str, now: float) -> Holder:
        """The entry of `worker`, which called at `now`."""
        holder = self._holders.get(worker)
        if holder is None:
            holder = self._holders[worker] = Holder(worker, changed=self._changed)
        holder.seen = now
        self._changed[holder] = None
        return holder

    def share(self, worker: str, ready: int, limit: int, *, now: float, silence_s: float) -> int:
        """How many of `ready` rows `worker`, which asks for `limit`, is granted; at least one if it holds none.

        Workers that have finished nothing yet, or that neither hold rows nor wait for some (nor did a moment ago),
        do not count.
        """
        mine = self.holder(worker, now)
        mine.slots = mine.rows + limit
        self._update(now, silence_s)
        division = self._division
        rows = ready + division.rows
        if mine.part is None or division.count < 2 or rows >= division.slots:
            return limit
        wanted = division.share(mine.part, rows) - mine.rows
        return min(limit, max(wanted, 0 if mine.rows else 1))

    def recent_workers(self, *, now: float, silence_s: float) -> list[Holder]:
        """The workers that wait for a lease or called within the last `silence_s`."""
        holders = list(self._holders.values())
        return [h for h in holders if h.waiting or now - h.seen <= silence_s]

    def _update(self, now: float, silence_s: float) -> None:
        """Bring the division in line with the workers that changed, by themselves or by the time that passed."""
        while self._looks and self._looks[0][0] < now:
            _, _, holder = heapq.heappop(self._looks)
            holder.look_at = math.inf
            self._changed[holder] = None
        for holder in self._changed:
            if self._holders.get(holder.name) is not holder:
                continue
            if holder.part is not None:
                self._division.drop(holder.part)
                holder.part = None
            idle_s = now - holder.seen
            if not holder.waiting and idle_s > silence_s:
                del self._holders[holder.name]
                continue
            if holder.speed and (holder.rows or holder.waiting or idle_s <= BETWEEN_S):
                pace = max(1, round(holder.speed * PACES))
                holder.part = self._division.add(pace, holder.slots, holder.rows)
            if not holder.waiting:
                ends = (holder.seen + BETWEEN_S, holder.seen + silence_s)
                look_at = min([end for end in ends if end >= now], default=now)
                if look_at < holder.look_at:
                    holder.look_at = look_at
                    heapq.heappush(self._looks, (look_at, next(self._number), holder))
        self._changed.clear()


class Division:
    """Divides rows in proportion to pace, at most `slots` each; what one cannot take goes to the others.

    With few rows everybody gets `level * pace`; a worker is full from the level `slots / pace` on. From one question
    to the next, the level moves past few workers, and only these move between the two heaps.
    """

    def __init__(self) -> None:
        self.count = self.slots = self.rows = 0
        """Totals over all workers."""
        self.moves = 0
        """Workers that the level has passed."""
        self._full_slots = 0
        self._open_pace = 0
        self._full: list[tuple[float, int, _Sharer]] = []
        """The last to become full first. In both heaps, parts that are gone stay until they come to the top."""
        self._open: list[tuple[float, int, _Sharer]] = []
        """The next to become full first."""
        self._number = itertools.count()

    def add(self, pace: int, slots: int, rows: int) -> _Sharer:
        """A worker comes in."""
        part = _Sharer(pace, slots, rows)
        self.count += 1
        self.slots += slots
        self.rows += rows
        self._enter(part, full=False)
        return part

    def drop(self, part: _Sharer) -> None:
        """Drop a worker that leaves."""
        self.count -= 1
        self.slots -= part.slots
        self.rows -= part.rows
        self._leave(part)
        part.gone = True

    def share(self, part: _Sharer, rows: int) -> int:
        """The share of `part` in `rows`, which are fewer than all slots; rounded up."""
        while (top := _top(self._full)) and self._open_pace * top.slots > self._left(
            rows
        ) * top.pace:
            self._move(self._full, top, full=False)
        while (top := _top(self._open)) and self._open_pace * top.slots <= self._left(
            rows
        ) * top.pace:
            self._move(self._open, top, full=True)
        if part.full:
            return part.slots
        return -(-self._left(rows) * part.pace // self._open_pace)

    def _left(self, rows: int) -> int:
        """Rows left for the workers that are not full."""
        return rows - self._full_slots

    def _move(self, heap: list[tuple[float, int, _Sharer]], part: _Sharer, *, full: bool) -> None:
        heapq.heappop(heap)
        self._leave(part)
        self._enter(part, full=full)
        self.moves += 1

    def _enter(self, part: _Sharer, *, full: bool) -> None:
        part.full = full
        level = part.slots / part.pace
        if full:
            self._full_slots += part.slots
            heapq.heappush(self._full, (-level, next(self._number), part))
            return
        self._open_pace += part.pace
        heapq.heappush(self._open, (level, next(self._number), part))
        if len(self._open) + len(self._full) > 2 * self.count + 64:
            self._open, self._full = _swept(self._open), _swept(self._full)

    def _leave(self, part: _Sharer) -> None:
        if part.full:
            self._full_slots -= part.slots
        else:
            self._open_pace -= part.pace


def _top(heap: list[tuple[float, int, _Sharer]]) -> _Sharer | None:
    while heap and heap[0][2].gone:
        heapq.heappop(heap)
    return heap[0][2] if heap else None


def _swept(heap: list[tuple[float, int, _Sharer]]) -> list[tuple[float, int, _Sharer]]:
    """The heap without holders that have left."""
    kept = [entry for entry in heap if not entry[2].gone]
    heapq.heapify(kept)
    return kept
