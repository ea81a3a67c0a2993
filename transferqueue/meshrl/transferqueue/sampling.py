"""The sampler port: a sampler keeps the complete groups of a run in the order in which `take` gives them out.

`OrderedSampler` is the common part of those that order groups by a key.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from meshrl.common.plugins import check_admitted, load
from meshrl.contract.types import Version

PACKAGE = "meshrl.transferqueue.samplers"

Key: TypeAlias = tuple[float, ...]


class CompleteGroup(NamedTuple):
    """A complete group as samplers see it."""

    number: int
    """The order of admission: the first group has the lowest number."""
    task_id: str
    priority: int
    num_tokens: tuple[int, ...]
    """Tokens of each finished row."""
    oldest: Version
    newest: Version
    data_source: str = ""
    difficulty: float = 0.0
    """The task's `extra_info["difficulty"]`."""


class Sampler(Protocol):
    """One per run, in RAM; filled again, in order of `number`, when the queue opens.

    It must be deterministic, so that the same feed gives the same batches. No method may cost more than O(log n) per
    group.
    """

    def add(self, group: CompleteGroup) -> None:
        """Add a complete group."""
        ...

    def discard(self, number: int) -> None:
        """Discard a group that was taken or left; never raises for one that is not there."""
        ...

    def first(self, count: int) -> Sequence[int]:
        """The numbers of the next `count` groups in order (fewer if there are fewer); they stay."""
        ...

    def __len__(self) -> int: ...


class OrderedNumbers:
    """A set of numbers with a key each; lowest key first, ties by number."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int]] = []
        self._keys: dict[int, Key] = {}

    def put(self, number: int, key: Key) -> None:
        """Add `number`, or move it to `key`. O(log n)."""
        self._keys[number] = key
        heapq.heappush(self._heap, (key, number))

    def discard(self, number: int) -> None:
        """Remove `number` if it is in the set. O(1): its heap entry is dropped when it reaches the top."""
        self._keys.pop(number, None)

    def first(self, count: int) -> list[int]:
        """The `count` first numbers (fewer if there are fewer); they stay. O(count log n)."""
        entries: list[tuple[Key, int]] = []
        while self._heap and len(entries) < count:
            entry = heapq.heappop(self._heap)
            # A number that left and came back under its old key has two equal entries, one after the other.
            if self._keys.get(entry[1]) == entry[0] and (not entries or entries[-1] != entry):
                entries.append(entry)
        for entry in entries:
            heapq.heappush(self._heap, entry)
        return [number for _, number in entries]

    def __len__(self) -> int:
        return len(self._keys)


class OrderedSampler(OrderedNumbers):
    """The common part of samplers that order groups by a key: lowest `key` first, ties by admission."""

    def key(self, group: CompleteGroup) -> Key:
        """The key of a group; the lowest is taken first."""
        return (group.number,)

    def add(self, group: CompleteGroup) -> None:
        """Add a complete group."""
        self.put(group.number, self.key(group))


def build(name: str, admitted: Collection[str] = ()) -> Sampler:
    """An instance of class `Sampler` of module `samplers.<name>`, or of a dotted path among `admitted`.

    The client that opens a run sends the name; the service's own recipe says what code it loads. Raises ConfigError.
    """
    check_admitted(PACKAGE, name, admitted, "queue.sampler")
    make: Callable[[], Sampler] = load(PACKAGE, name, "Sampler")
    return make()
