"""Fair share: divides the rows at the end of a batch so that all workers finish at about the same time.

A slow worker that leases as many rows as it has slots finishes last, with rows that faster workers could have
sampled. So the rows that are leased or ready are divided in proportion to measured speed, up to each worker's slots
(water-filling), and no worker is granted more than its share. While there are rows for all slots, nothing is limited.

Speed is the tokens per second of one *row*, not of the worker: a worker with few rows does not look slower, and one
with many rows looks slower than it is, so the division converges to one where all finish together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WEIGHT = 0.1
"""The weight of the newest row in the moving average of speeds."""

BETWEEN_S = 2.0
"""A worker without rows counts until so long after its last call: a publish ends its wait, and it asks again."""


@dataclass(slots=True, eq=False)
class Holder:
    """What the leases of one worker show about it."""

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

    def finished(self, tokens: Sequence[int], seconds: float) -> None:
        """It wrote rows of so many `tokens` each, `seconds` after they were granted."""
        took = max(seconds, 1e-3)
        for of_row in tokens:
            self.speed += (of_row / took - self.speed) * (WEIGHT if self.speed else 1.0)


class FairShare:
    """The workers of one stage."""

    def __init__(self) -> None:
        self._holders: dict[str, Holder] = {}

    def holder(self, worker: str, now: float) -> Holder:
        """The entry of `worker`, which called at `now`."""
        holder = self._holders.setdefault(worker, Holder())
        holder.seen = now
        return holder

    def count_wait(self, worker: str, now: float, change: int) -> None:
        """`worker` waits for one lease more (1) or less (-1)."""
        self.holder(worker, now).waiting += change

    def share(self, worker: str, ready: int, limit: int, *, now: float, silence_s: float) -> int:
        """How many of `ready` rows `worker`, which asks for `limit`, is granted; at least one if it holds none.

        Workers that have finished nothing yet, or that neither hold rows nor wait for some (nor did a moment ago), do
        not count.
        """
        mine = self.holder(worker, now)
        mine.slots = mine.rows + limit
        recent = self.recent_workers(now=now, silence_s=silence_s)
        self._holders = {name: h for name, h in self._holders.items() if h in recent}
        known = [
            h for h in recent if h.speed and (h.rows or h.waiting or now - h.seen <= BETWEEN_S)
        ]
        if not mine.speed or len(known) < 2:
            return limit
        shares = divide(
            ready + sum(holder.rows for holder in known),
            [holder.speed for holder in known],
            [holder.slots for holder in known],
        )
        wanted = math.ceil(shares[known.index(mine)]) - mine.rows
        return min(limit, max(wanted, 0 if mine.rows else 1))

    def recent_workers(self, *, now: float, silence_s: float) -> list[Holder]:
        """The workers that wait for a lease or called within the last `silence_s`."""
        holders = list(self._holders.values())
        return [h for h in holders if h.waiting or now - h.seen <= silence_s]


def divide(rows: int, speeds: Sequence[float], slots: Sequence[int]) -> list[float]:
    """Divide `rows` in proportion to `speeds`, at most `slots` each; what one cannot take goes to the others."""
    shares = [0.0] * len(speeds)
    left, open_ = float(rows), set(range(len(speeds)))
    while open_ and left > 0:
        level = left / sum(speeds[i] for i in open_)
        full = {i for i in open_ if speeds[i] * level >= slots[i]}
        if not full:
            for i in open_:
                shares[i] = speeds[i] * level
            break
        for i in full:
            shares[i] = float(slots[i])
            left -= slots[i]
        open_ -= full
    return shares
