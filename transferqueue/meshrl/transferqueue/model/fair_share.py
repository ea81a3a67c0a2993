"""Who should hold how many of the rows that are left: as many as each can finish in the same time.

A worker that samples slowly and leases whatever its slots hold is the last one to finish at the end of a batch, with
rows that others could have had. So the rows that are out or ready are divided by measured speed, up to each one's
slots (water-filling), and nobody is granted more than its share. Rows enough for all slots bound nothing.

Speed is a *row's* tokens a second, not the worker's: a worker with few rows looks no slower for it, and one with many
looks slower than it is, so the division settles where all finish together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WEIGHT = 0.1
"""Of the newest row in the moving average of speeds."""

BETWEEN_S = 2.0
"""So long after its last sign a worker that holds nothing may be about to ask again: a publish ends waits."""


@dataclass(slots=True, eq=False)
class Holder:
    """One worker, as its leases show it."""

    rows: int = 0
    """Held now."""
    slots: int = 0
    """Held when it last asked, and what it asked for."""
    speed: float = 0.0
    """Tokens a second of one row; 0 before the first one is finished."""
    seen: float = 0.0
    """When it last asked, renewed or stopped waiting."""
    waiting: int = 0
    """Leases that it waits for now."""

    def finished(self, tokens: Sequence[int], seconds: float) -> None:
        """It wrote rows of so many tokens each, which it had for so long."""
        took = max(seconds, 1e-3)
        for of_row in tokens:
            self.speed += (of_row / took - self.speed) * (WEIGHT if self.speed else 1.0)


class FairShare:
    """The workers of one stage."""

    def __init__(self) -> None:
        self._holders: dict[str, Holder] = {}

    def holder(self, worker: str, now: float) -> Holder:
        """The books of `worker`, which was heard of now."""
        holder = self._holders.setdefault(worker, Holder())
        holder.seen = now
        return holder

    def count_wait(self, worker: str, now: float, change: int) -> None:
        """`worker` waits for one lease more (1) or less (-1)."""
        self.holder(worker, now).waiting += change

    def share(self, worker: str, ready: int, limit: int, *, now: float, silence_s: float) -> int:
        """How many of `ready` rows `worker`, which wants `limit`, should be granted; at least one if it has none.

        Workers that neither hold rows nor wait for some (nor did a moment ago), or have finished nothing yet, are not
        reckoned with.
        """
        mine = self.holder(worker, now)
        mine.slots = mine.rows + limit
        here = self.heard_of(now=now, silence_s=silence_s)
        self._holders = {name: h for name, h in self._holders.items() if h in here}
        known = [h for h in here if h.speed and (h.rows or h.waiting or now - h.seen <= BETWEEN_S)]
        if not mine.speed or len(known) < 2:
            return limit
        shares = divide(
            ready + sum(holder.rows for holder in known),
            [holder.speed for holder in known],
            [holder.slots for holder in known],
        )
        wanted = math.ceil(shares[known.index(mine)]) - mine.rows
        return min(limit, max(wanted, 0 if mine.rows else 1))

    def heard_of(self, *, now: float, silence_s: float) -> list[Holder]:
        """The workers that are there, as far as leases tell."""
        holders = list(self._holders.values())
        return [h for h in holders if h.waiting or now - h.seen <= silence_s]


def divide(rows: int, speeds: Sequence[float], slots: Sequence[int]) -> list[float]:
    """`rows` in proportion to `speeds`, nobody above its `slots`; what one cannot take goes to the others."""
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
