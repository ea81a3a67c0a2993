"""Where a task lives: rendezvous hashing, so that a shard more moves few tasks and only to the new shard.

Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998): the shard with the highest hash of
(shard, task) has the task. With one shard more the winner stays or is the new shard, never another old one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from meshrl.contract.errors import CorruptError


class Grown(Exception):
    """There are more shards than the router knew of: it learns of them and asks again."""


@lru_cache(maxsize=1 << 16)
def owner(task: str, shards: int) -> int:
    """The number of the shard, of `shards`, that a task is admitted to. Stable across processes and releases."""
    return max(range(shards), key=lambda shard: _weight(task, shard))


def _weight(task: str, shard: int) -> bytes:
    return blake2b(f"{shard}/{task}".encode(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class Members:
    """The shards of one run: it began on the first `began` of them and is on the first `count` now."""

    began: int
    count: int

    def home(self, task: str) -> int:
        """Where a task that nobody knows yet is admitted."""
        return owner(task, self.count)

    def homes(self, task: str) -> Iterator[int]:
        """Where a task may be, the newest place first: one place, unless shards were added."""
        last = -1
        for shards in range(self.count, self.began - 1, -1):
            place = owner(task, shards)
            if place != last:
                yield place
            last = place

    @property
    def grown(self) -> bool:
        """True when shards were added since the run began."""
        return self.began != self.count

    def check(self, recorded: str) -> None:
        """Raises Grown when the run is on other shards by now; `recorded` is empty where it never was on several."""
        if recorded and recorded != str(self):
            raise Grown

    def __str__(self) -> str:
        return f"{self.began} {self.count}"

    @classmethod
    def parse(cls, text: str) -> Members:
        """The inverse of `str`. Raises CorruptError."""
        try:
            began, count = map(int, text.split())
        except ValueError:
            raise CorruptError(f"not the shards of a run: {text!r} (want BEGAN COUNT)") from None
        return cls(began, count)
