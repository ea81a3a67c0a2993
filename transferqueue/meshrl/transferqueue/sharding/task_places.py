"""Where the tasks of a run are that has had shards added: wherever they were admitted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from meshrl.transferqueue.sharding.fan_out import all_of, by_key
from meshrl.transferqueue.sharding.placement import Members
from meshrl.transferqueue.sharding.port import Shard

Item = TypeVar("Item")

PLACES = 1 << 18
"""Tasks whose place is kept in mind."""


class TaskPlaces:
    """What one router knows. A place never changes: a task stays where it is until it has left."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._places: dict[tuple[str, str], int] = {}

    def note(self, run: str, tasks: Iterable[str], number: int) -> None:
        """A shard has handed these tasks out."""
        if len(self._places) > PLACES:
            self._places.clear()
        self._places.update(((run, task), number) for task in tasks)

    async def by_shard(
        self, run: str, members: Members, items: Sequence[Item], task_of: Callable[[Item], str]
    ) -> Mapping[int, Sequence[Item]]:
        """`items` by the shard that has their task; one that no shard knows belongs where it would be admitted."""
        if not members.grown:
            return by_key((members.home(task_of(item)), item) for item in items)
        found = await self._located(run, members, {task_of(item) for item in items})
        return by_key((found[task_of(item)], item) for item in items)

    async def _located(self, run: str, members: Members, tasks: Iterable[str]) -> Mapping[str, int]:
        found = {task: self._places.get((run, task), -1) for task in tasks}
        unknown = [task for task, number in found.items() if number < 0]
        asked = by_key((number, task) for task in unknown for number in members.homes(task))
        rooms = await all_of(
            self._shards[number].room(run, tasks=part) for number, part in asked.items()
        )
        for number, room in zip(asked, rooms, strict=True):
            self.note(run, room.known, number)
            found.update(dict.fromkeys(room.known, number))
        return {
            task: members.home(task) if number < 0 else number for task, number in found.items()
        }
