"""The sampler port: a sampler keeps the complete groups of a run in the order in which `take` gives them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

from meshrl.contract.plugins import load
from meshrl.contract.types import Version

PACKAGE = "meshrl.transferqueue.samplers"


class CompleteGroup(NamedTuple):
    """What a sampler knows about a group."""

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
        """A group became complete."""
        ...

    def discard(self, number: int) -> None:
        """A group was taken or left; never raises for one that is not there."""
        ...

    def first(self, count: int) -> Sequence[int]:
        """The numbers of the next `count` groups in order (fewer if there are fewer); they stay."""
        ...

    def __len__(self) -> int: ...


def build(name: str) -> Sampler:
    """An instance of class `Sampler` of module `samplers.<name>` or of a dotted path. Raises ConfigError."""
    return cast(Sampler, load(PACKAGE, name, "Sampler")())
