"""The complete groups of a run, in the order in which `take` gives them out."""

from __future__ import annotations

from meshrl.transferqueue.model.group import Group
from meshrl.transferqueue.model.ordered import OrderedNumbers
from meshrl.transferqueue.sampling import CompleteGroup, Sampler


class CompleteGroups:
    """Groups that were taken before come first, in their old order; then those of the sampler, in its order."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._taken_before = OrderedNumbers()
        """By position."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, group: Group) -> None:
        """The group, which is in no batch, became complete."""
        group.complete = True
        self._count += 1
        if group.position >= 0:
            self._taken_before.add(group.number, (group.position,))
            return
        facts = group.facts_of(group.finished)
        _, num_tokens, oldest, newest, _ = zip(*facts, strict=True)
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
        """The group, if it is here, was taken, left or is not complete any more."""
        if group.complete:
            group.complete = False
            self._count -= 1
            self._sampler.discard(group.number)
            self._taken_before.discard(group.number)

    def first(self, count: int) -> list[int]:
        """The numbers of the next `count` groups in order (fewer if there are fewer); they stay."""
        numbers = self._taken_before.first(count)
        if len(numbers) < count:
            numbers += self._sampler.first(count - len(numbers))
        return numbers
