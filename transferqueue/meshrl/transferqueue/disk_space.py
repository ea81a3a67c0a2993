"""Whether the store has space for what comes in, and who was told that it has not: what `why_waiting` says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshrl.contract.errors import CapacityError
from meshrl.contract.types import Waiting
from meshrl.transferqueue.store import Store


class Space:
    """Asked before anything that brings bytes. Nothing is kept for whoever is refused: callers ask again."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._refused: dict[tuple[str, str], tuple[float, int]] = {}
        """By run and caller: since when, and how many bytes."""

    def check(self, run: str, who: str, nbytes: int) -> None:
        """Raises CapacityError when `nbytes` would not leave space for rows to leave."""
        try:
            self._store.check_room(nbytes)
        except CapacityError:
            since, _ = self._refused.get((run, who), (self._clock(), 0))
            self._refused[run, who] = (since, nbytes)
            raise
        self._refused.pop((run, who), None)

    def waiting(self, run: str) -> Iterator[Waiting]:
        """A line for each caller that was refused and would be still; one for the queue, if nothing fits at all."""
        now = self._clock()
        told = False
        for (of_run, who), (since, nbytes) in list(self._refused.items()):
            if of_run == run and (why := self._lacks(nbytes)):
                told = True
                yield Waiting(who=who, what=f"space in the store: {why}", since_s=now - since)
        if not told and (why := self._lacks(1)):
            yield Waiting(who="everybody", what=f"space in the store: {why}", since_s=0.0)

    def _lacks(self, nbytes: int) -> str:
        try:
            self._store.check_room(nbytes)
        except CapacityError as error:
            return error.message
        return ""
