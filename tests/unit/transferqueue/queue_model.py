"""The queue as a reader of the port would write it down: lists, scans and sorts, nothing incremental, no store."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

STAGES = ("rollout", "reward", "reference")
FINAL = frozenset(STAGES)


@dataclass(eq=False)
class ModelRow:
    group: ModelGroup
    index: int
    attempt: int
    done: set[str] = field(default_factory=set)
    held: dict[str, int] = field(default_factory=dict)
    delivered: Counter[str] = field(default_factory=Counter)
    step: int = 0
    """Of the version that sampled it."""

    @property
    def name(self) -> str:
        return f"{self.group.task}.{self.index}.{self.attempt}"

    def leasable(self, stage: str) -> bool:
        first = stage == "rollout" or "rollout" in self.done
        return first and stage not in self.done and stage not in self.held

    @property
    def state(self) -> str:
        if self.group.batch is not None:
            return "settled" if self.group.batch.settled else "taken"
        if self.done == FINAL:
            return "ready"
        if self.done:
            return "pending"
        return "leased" if self.held else "queued"


@dataclass(eq=False)
class ModelGroup:
    number: int
    task: str
    rows: list[ModelRow] = field(default_factory=list)
    batch: ModelBatch | None = None
    position: int | None = None

    @property
    def complete(self) -> bool:
        return self.batch is None and all(row.done == FINAL for row in self.rows)


@dataclass(eq=False)
class ModelBatch:
    name: str
    step: int
    groups: list[ModelGroup]
    settled: bool = False


class Model:
    """One gated run: groups of `size`, policy `all`, re-issue."""

    def __init__(self, size: int, batch: int, staleness: int, attempts: int) -> None:
        self.size, self.batch, self.staleness, self.attempts = size, batch, staleness, attempts
        self.groups: list[ModelGroup] = []
        self.batches: list[ModelBatch] = []
        self.seen: list[str] = []
        self.admitted = self.trained = 0
        self.filtered, self.stale, self.dead = Counter[str](), Counter[str](), Counter[str]()
        self.epoch, self.published, self.committed, self.takes = 1, 0, 0, 0

    def room(self) -> int:
        consumed = sum(len(b.groups) for b in self.batches if b.settled and b.step < self.published)
        return max(0, (self.staleness + 1) * self.batch - len(self.groups) + consumed)

    def admit(self, names: list[str]) -> int:
        count = 0
        for name in names:
            if name not in self.seen:
                if self.room() == 0:
                    break
                group = ModelGroup(len(self.seen), name)
                group.rows = [ModelRow(group, index, 0) for index in range(self.size)]
                self.seen.append(name)
                self.groups.append(group)
                self.admitted += self.size
            count += 1
        return count

    def leasable(self, stage: str) -> list[ModelRow]:
        groups = sorted((g for g in self.groups if g.batch is None), key=lambda g: g.number)
        return [row for group in groups for row in group.rows if row.leasable(stage)]

    def fail(self, row: ModelRow, stage: str, reason: str) -> None:
        del row.held[stage]
        if row.delivered[stage] >= self.attempts:
            self.dead[reason] += 1
            self.filtered["group_incomplete"] += len(row.group.rows) - 1
            self.groups.remove(row.group)

    def take(self, name: str, step: int, count: int) -> list[ModelRow] | None:
        while True:
            complete = [group for group in self.groups if group.complete]
            again = [group for group in complete if group.position is not None]
            again.sort(key=lambda group: group.position or 0)
            fresh = sorted((g for g in complete if g.position is None), key=lambda g: g.number)
            found = (again + fresh)[:count]
            stale = [g for g in found if any(step - r.step > self.staleness for r in g.rows)]
            if not stale:
                break
            for group in stale:
                self._reissue(group)
        if len(found) < count:
            return None
        batch = ModelBatch(name, step, found)
        self.batches.append(batch)
        for group in found:
            group.batch = batch
            if group.position is None:
                group.position = self.takes
                self.takes += 1
        return [row for group in found for row in group.rows]

    def _reissue(self, group: ModelGroup) -> None:
        self.stale["reissued"] += self.size
        self.admitted += self.size
        attempt = group.rows[0].attempt + 1
        group.rows = [ModelRow(group, index, attempt) for index in range(self.size)]
        group.position = None

    def filter(self, group: ModelGroup, reason: str) -> None:
        assert group.batch is not None
        self.filtered[reason] += len(group.rows)
        group.batch.groups.remove(group)
        self.groups.remove(group)

    def commit(self, step: int) -> None:
        if step < self.committed:
            return
        for batch in [b for b in self.batches if b.settled and b.step < step]:
            self.batches.remove(batch)
            for group in batch.groups:
                self.trained += len(group.rows)
                self.groups.remove(group)
        self.committed = step

    def give_back(self, batches: list[ModelBatch]) -> int:
        for batch in batches:
            self.batches.remove(batch)
            for group in batch.groups:
                group.batch = None
        return sum(len(group.rows) for batch in batches for group in batch.groups)

    def resident(self) -> dict[str, int]:
        return dict(Counter(row.state for group in self.groups for row in group.rows))
