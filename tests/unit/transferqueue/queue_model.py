"""A simple model of the queue: lists, scans and sorts, nothing incremental, no store."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from meshrl.contract.rows import UNTRAINABLE
from meshrl.contract.types import GroupPolicy, RunSpec, StalePolicy
from meshrl.transferqueue.model.batches import ALONE, ALONE_LAST

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
    """Step of the version that sampled it."""

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
    wanted: int
    """Finished rows that make it complete."""
    attempts: list[int]
    """Attempts by index."""
    replaced: Counter[int] = field(default_factory=Counter)
    rows: list[ModelRow] = field(default_factory=list)
    """The resident rows, by index."""
    batch: ModelBatch | None = None
    position: int | None = None
    deaths: int = 0
    """Trainers that died with it since it was settled or had other rows."""
    failed_in: int = 0
    """Epoch of the last of them that said that its step failed."""
    died_alone: int = 0
    """The others that had nothing else in hand and before which steps were made."""
    settled_before: int = -1
    """Batches settled when the last of these died."""

    def forget_deaths(self) -> None:
        self.deaths = self.failed_in = self.died_alone = 0
        self.settled_before = -1

    @property
    def complete(self) -> bool:
        return self.batch is None and sum(row.done == FINAL for row in self.rows) >= self.wanted

    def add(self, *indices: int) -> None:
        """Fresh rows, which have not been replaced."""
        self.replaced.subtract({index: self.replaced[index] for index in indices})
        self.rows += [ModelRow(self, index, self.attempts[index]) for index in indices]
        self.rows.sort(key=lambda row: row.index)
        self.forget_deaths()


@dataclass(eq=False)
class ModelBatch:
    name: str
    step: int
    groups: list[ModelGroup]
    settled: bool = False


@dataclass(eq=False)
class ModelLetter:
    """A dead row; `attempts` are those of its group when it left, so that a replay repeats no attempt."""

    number: int
    task: str
    index: int
    attempt: int
    attempts: list[int]

    @property
    def name(self) -> str:
        return f"{self.task}.{self.index}.{self.attempt}"


class Model:
    """One gated run of groups of `size`."""

    def __init__(self, spec: RunSpec) -> None:
        self.size, self.batch = spec.group_size, spec.batch_groups
        self.staleness, self.attempts = spec.max_staleness, spec.max_attempts
        self.policy, self.drops = spec.group_policy, spec.stale_policy is StalePolicy.DROP
        self.wanted = spec.group_k if self.policy is GroupPolicy.K_OF_N else self.size
        self.letters: list[ModelLetter] = []
        self.groups: list[ModelGroup] = []
        self.batches: list[ModelBatch] = []
        self.seen: list[str] = []
        self.admitted = self.trained = 0
        self.filtered, self.stale, self.dead = Counter[str](), Counter[str](), Counter[str]()
        self.published, self.committed, self.takes, self.settled = 0, 0, 0, 0

    def room(self) -> int:
        consumed = sum(len(b.groups) for b in self.batches if b.settled and b.step < self.published)
        return max(0, int((self.staleness + 1) * self.batch) - len(self.groups) + consumed)

    def admit(self, names: list[str]) -> int:
        count = 0
        for name in names:
            if name not in self.seen:
                if self.room() == 0:
                    break
                self._enter(len(self.seen), name, [0] * self.size)
                self.seen.append(name)
            count += 1
        return count

    def _enter(self, number: int, task: str, attempts: list[int]) -> None:
        group = ModelGroup(number, task, self.wanted, attempts)
        group.add(*range(self.size))
        self.groups.append(group)
        self.admitted += self.size

    def _leave(self, group: ModelGroup) -> None:
        self.groups.remove(group)
        for letter in self.letters:
            if letter.number == group.number:
                letter.attempts = [*group.attempts]

    def leasable(self, stage: str) -> list[ModelRow]:
        groups = sorted((g for g in self.groups if g.batch is None), key=lambda g: g.number)
        return [row for group in groups for row in group.rows if row.leasable(stage)]

    def fail(self, row: ModelRow, stage: str, reason: str) -> None:
        del row.held[stage]
        if row.delivered[stage] >= self.attempts:
            self._die(row, reason)

    def _die(self, row: ModelRow, reason: str) -> None:
        group = row.group
        attempts = [*group.attempts]
        self.letters.append(ModelLetter(group.number, group.task, row.index, row.attempt, attempts))
        self.dead[reason] += 1
        group.rows.remove(row)
        replaced = group.replaced[row.index]
        if self.policy is GroupPolicy.REPLACE_SIBLING and replaced < self.attempts:
            group.attempts[row.index] += 1
            group.add(row.index)
            group.replaced[row.index] = replaced + 1
            self.admitted += 1
        elif self.policy is not GroupPolicy.K_OF_N or len(group.rows) < self.wanted:
            if group.rows:
                self.filtered["group_incomplete"] += len(group.rows)
            self._leave(group)

    def replay(self, letters: list[ModelLetter]) -> int:
        """How many letters are answered: all but those whose group is in a batch."""
        answered = 0
        for letter in letters:
            group = next((g for g in self.groups if g.number == letter.number), None)
            if group is not None and group.batch is not None:
                continue
            answered += 1
            self.letters.remove(letter)
            if group is None:
                self._enter(letter.number, letter.task, [a + 1 for a in letter.attempts])
            elif all(row.index != letter.index for row in group.rows):
                group.attempts[letter.index] += 1
                group.add(letter.index)
                self.admitted += 1
        return answered

    def _fresh(self, step: int, count: int) -> list[ModelGroup]:
        """The next groups that are not too old; those that are leave."""
        while True:
            complete = [group for group in self.groups if group.complete]
            again = [group for group in complete if group.position is not None]
            again.sort(key=lambda group: group.position or 0)
            fresh = sorted((g for g in complete if g.position is None), key=lambda g: g.number)
            chosen = (again + fresh)[:count]
            stale = [group for group in chosen if self._too_old(group, step)]
            if not stale:
                return chosen
            for group in stale:
                self._retire(group)

    def take(self, name: str, step: int, count: int) -> list[ModelRow] | None:
        chosen, enough = self._fresh(step, count), count
        if held := [group for group in chosen if group.settled_before == self.settled]:
            more = self._fresh(step, count + len(held))
            if others := [group for group in more if group.settled_before != self.settled]:
                chosen, enough = others[:count], 0
        if suspects := [group for group in chosen if group.deaths >= 2]:
            fewest = min(group.deaths for group in suspects)
            part = [group for group in suspects if group.deaths == fewest]
            chosen = part[: max(1, count // 2 ** (fewest - 1))]
        elif len(chosen) < enough:
            return None
        batch = ModelBatch(name, step, chosen)
        self.batches.append(batch)
        for group in chosen:
            self._leave_unfinished(group)
            group.batch = batch
            if group.position is None:
                group.position = self.takes
                self.takes += 1
        return [row for group in chosen for row in group.rows]

    def _too_old(self, group: ModelGroup, step: int) -> bool:
        sampled = [row for row in group.rows if "rollout" in row.done]
        return any(step - row.step > self.staleness for row in sampled)

    def _leave_unfinished(self, group: ModelGroup) -> None:
        """Unfinished rows of a complete group, which only `k_of_n` has, leave."""
        finished = [row for row in group.rows if row.done == FINAL]
        if spare := len(group.rows) - len(finished):
            self.filtered["k_of_n"] += spare
        group.rows = finished

    def _retire(self, group: ModelGroup) -> None:
        given_up = not self.drops and min(group.attempts) >= self.attempts
        reason = "dropped" if self.drops else "stale at each attempt" if given_up else "reissued"
        self.stale[reason] += len(group.rows)
        if self.drops or given_up:
            self._leave(group)
            return
        group.attempts = [attempt + 1 for attempt in group.attempts]
        group.rows = []
        died = group.deaths, group.died_alone, group.settled_before
        group.add(*range(self.size))
        group.deaths, group.died_alone, group.settled_before = died
        self.admitted += self.size
        group.position = None

    def filter(self, group: ModelGroup, reason: str) -> None:
        assert group.batch is not None
        self.filtered[reason] += len(group.rows)
        group.batch.groups.remove(group)
        self._leave(group)

    def commit(self, step: int) -> None:
        if step < self.committed:
            return
        for batch in [b for b in self.batches if b.settled and b.step < step]:
            self.batches.remove(batch)
            for group in batch.groups:
                self.trained += len(group.rows)
                self._leave(group)
        self.committed = step

    def restarted(self) -> None:
        """The queue is another process."""
        self.settled = 0
        for group in self.groups:
            group.settled_before = -1

    def died(self, epoch: int) -> None:
        """A trainer died, and another one has the run."""
        batches = [batch for batch in self.batches if not batch.settled]
        in_hand = [group for batch in batches for group in batch.groups]
        self.give_back(batches)
        for group in in_hand:
            group.deaths += 1
        if len(in_hand) != 1 or in_hand[0].failed_in == epoch:
            return
        (alone,) = in_hand
        clean = [
            g for g in self.groups if not g.died_alone and any(r.done == FINAL for r in g.rows)
        ]
        if (
            not alone.died_alone
            or alone.settled_before not in (-1, self.settled)
            or (not clean and alone.deaths >= ALONE_LAST)
        ):
            alone.died_alone += 1
        alone.settled_before = self.settled
        if alone.died_alone >= ALONE:
            for row in list(alone.rows):
                if alone in self.groups:
                    self._die(row, f"{UNTRAINABLE}: trainers die with its group alone in hand")

    def failed(self, batch: ModelBatch, epoch: int, reason: str) -> None:
        """The step of the batch's only group failed."""
        (group,) = batch.groups
        if group.failed_in in (0, epoch):
            group.failed_in = epoch
            return
        batch.groups.remove(group)
        group.batch = None
        for row in list(group.rows):
            if group in self.groups:
                self._die(row, f"cannot be trained on: twice {reason}")

    def settle(self, batch: ModelBatch) -> None:
        batch.settled = True
        self.settled += 1
        for group in batch.groups:
            group.forget_deaths()

    def give_back(self, batches: list[ModelBatch]) -> int:
        for batch in batches:
            self.batches.remove(batch)
            for group in batch.groups:
                group.batch = None
        return sum(len(group.rows) for batch in batches for group in batch.groups)

    def resident(self) -> dict[str, int]:
        return dict(Counter(row.state for group in self.groups for row in group.rows))
