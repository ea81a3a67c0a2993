"""The stages of a run: which columns each one writes, which stages come before it, how many rows a worker gets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshrl.contract.errors import UserError
from meshrl.contract.types import StageSpec


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage; `number` is its index in every list that has an entry per stage."""

    number: int
    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    after: tuple[int, ...]
    """Numbers of the stages that write what this one reads."""
    first: bool
    """It reads nothing: it samples, so it follows the policy's version."""


class Stages:
    """All stages of a run; the constructor checks them.

    Raises:
        UserError: names the stage and the column that are wrong.
    """

    def __init__(self, specs: Sequence[StageSpec]) -> None:
        self._of_column: dict[str, int] = {}
        for number, spec in enumerate(specs):
            for column in spec.writes:
                if column in self._of_column:
                    other = specs[self._of_column[column]].name
                    raise UserError(f"column {column} is written by {other} and by {spec.name}")
                self._of_column[column] = number
        self._by_name: dict[str, Stage] = {}
        for number, spec in enumerate(specs):
            self._check(spec, number)
            after = tuple(sorted({self._of_column[column] for column in spec.reads}))
            self._by_name[spec.name] = Stage(
                number, spec.name, spec.reads, spec.writes, after, first=not spec.reads
            )
        self._ordered = tuple(self._by_name.values())
        self.writes = tuple(stage.writes for stage in self._ordered)
        """By stage number: the columns that it writes."""
        if not any(stage.first for stage in self):
            raise UserError("a run needs a stage that reads nothing: the one that samples")

    def _check(self, spec: StageSpec, number: int) -> None:
        if spec.name in self._by_name:
            raise UserError(f"two stages are named {spec.name}")
        if not spec.writes:
            raise UserError(f"stage {spec.name} writes no column")
        for column in spec.reads:
            writer = self._of_column.get(column)
            if writer is None or writer >= number:
                raise UserError(
                    f"stage {spec.name} reads {column}, which no earlier stage writes"
                    f" (written before it: {', '.join(self._written_before(number)) or 'nothing'})"
                )

    def _written_before(self, number: int) -> list[str]:
        return [column for column, writer in self._of_column.items() if writer < number]

    def __iter__(self) -> Iterator[Stage]:
        return iter(self._ordered)

    def __len__(self) -> int:
        return len(self._ordered)

    def get(self, name: str) -> Stage | None:
        """The stage with this name, if the run has it."""
        return self._by_name.get(name)

    def __getitem__(self, name: str) -> Stage:
        stage = self._by_name.get(name)
        if stage is None:
            raise UserError(f"no stage named {name!r} (the run has {', '.join(self._by_name)})")
        return stage

    def depending_on(self, stage: Stage) -> set[int]:
        """Numbers of `stage` and of all stages that read what it writes, directly or not."""
        numbers = {stage.number}
        for other in self._ordered[stage.number + 1 :]:
            if numbers & set(other.after):
                numbers.add(other.number)
        return numbers

    def of_columns(self, columns: Sequence[str]) -> list[Stage]:
        """The stages that write `columns`, each once.

        Raises:
            UserError: no stage of the run writes one of the columns.
        """
        for column in columns:
            if column not in self._of_column:
                raise UserError(
                    f"no stage of the run writes column {column!r}"
                    f" (columns: {', '.join(self._of_column)})"
                )
        return [self._ordered[n] for n in sorted({self._of_column[name] for name in columns})]


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
    """The workers of one stage: divides the rows at the end of a batch so that all finish at about the same time.

    A slow worker that leases as many rows as it has slots finishes last, with rows that faster workers could have
    sampled. So the rows that are leased or ready are divided in proportion to measured speed, up to each worker's
    slots (water-filling), and no worker is granted more than its share. While there are rows for all slots, nothing
    is limited.

    Speed is the tokens per second of one *row*, not of the worker: a worker with few rows does not look slower, and
    one with many rows looks slower than it is, so the division converges to one where all finish together.
    """

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

        O(workers) while there are rows for all slots; otherwise as many passes over them as `divide` makes. Workers
        that have finished nothing yet, or that neither hold rows nor wait for some (nor did a moment ago), do not
        count.
        """
        mine = self.holder(worker, now)
        mine.slots = mine.rows + limit
        silent = [
            name
            for name, holder in self._holders.items()
            if not holder.waiting and now - holder.seen > silence_s
        ]
        for name in silent:
            del self._holders[name]
        if not mine.speed:
            return limit
        known = [
            holder
            for holder in self._holders.values()
            if holder.speed and (holder.rows or holder.waiting or now - holder.seen <= BETWEEN_S)
        ]
        rows = ready + sum([holder.rows for holder in known])
        if len(known) < 2 or rows >= sum([holder.slots for holder in known]):
            return limit
        shares = divide(
            rows,
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
