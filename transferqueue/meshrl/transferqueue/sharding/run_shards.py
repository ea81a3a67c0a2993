"""Which shards a run is on, and which of them a task is admitted to.

**A task's shard** follows from rendezvous hashing: the shard with the highest hash of (shard, task) has the task.
With one shard more the winner stays or is the new shard, never another old one, so a new shard moves few tasks.
Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998).

**A run's shards** are a note on shard 0, `<run>.shards`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from meshrl.contract.errors import ConflictError, CorruptError, NotFoundError, UserError
from meshrl.contract.ports import Queue
from meshrl.contract.types import RunState
from meshrl.transferqueue.sharding.port import Shard

SUFFIX = ".shards"
"""Ends the name of every note."""


class ShardsAdded(Exception):
    """The run is on more shards than the router knew: it learns of them and repeats the call."""


@lru_cache(maxsize=1 << 16)
def owner(task: str, shards: int) -> int:
    """The number of the shard, of `shards`, that a task is admitted to. Stable across processes and releases."""
    return max(range(shards), key=lambda shard: _weight(task, shard))


def _weight(task: str, shard: int) -> bytes:
    return blake2b(f"{shard}/{task}".encode(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class RunShards:
    """The shards of one run: it began on the first `began` of them and is on the first `count` now."""

    began: int
    count: int

    def home(self, task: str) -> int:
        """The shard to which a new task is admitted."""
        return owner(task, self.count)

    def homes(self, task: str) -> Iterator[int]:
        """The shards that may have a task, the newest first: one shard, unless shards were added."""
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
        """Raises ShardsAdded when the run is on other shards by now; `recorded` is empty where no note is."""
        if recorded and recorded != str(self):
            raise ShardsAdded

    def __str__(self) -> str:
        return f"{self.began} {self.count}"

    @classmethod
    def parse(cls, text: str) -> RunShards:
        """The inverse of `str`. Raises CorruptError."""
        try:
            began, count = map(int, text.split())
        except ValueError:
            raise CorruptError(f"not the shards of a run: {text!r} (want BEGAN COUNT)") from None
        return cls(began, count)


async def recorded(first: Queue, run: str) -> RunShards:
    """The shards of an open run. A run without a note began on a single queue."""
    record = await _state(first, run + SUFFIX)
    return RunShards.parse(record.cursor) if record and record.cursor else RunShards(1, 1)


async def join(first: Shard, run: str, available: int) -> RunShards:
    """The shards of a run that is about to be opened: all that are available. Written before anything is on them.

    Raises:
        UserError: the run is on more shards than are available.
    """
    while True:
        # The run is looked up before its note: a router that opens a run writes the note first.
        opened = await _state(first, run) is not None
        text = (await first.note(run + SUFFIX)).text
        began = 1 if opened else available
        members = RunShards.parse(text) if text else RunShards(began, began)
        check_available(run, members, available)
        members = RunShards(members.began, available)
        try:
            await first.write_note(run + SUFFIX, str(members), instead_of=text)
        except ConflictError:
            continue  # another router opened the run, or put it on more shards
        return members


async def check_alone(queue: Queue, run: str) -> None:
    """Raises UserError when `queue` is only one of the shards of the run."""
    if await _state(queue, run) is not None:
        check_available(run, await recorded(queue, run), 1)


def check_available(run: str, members: RunShards, available: int) -> None:
    """Raises UserError when a run is on more shards than are available."""
    if members.count > available:
        raise UserError(
            f"run {run} is on {members.count} queue shards, not on {available}:"
            f" name all of them, in the same order (queue.shards={members.count})"
        )


async def _state(first: Queue, run: str) -> RunState | None:
    try:
        return await first.run_state(run)
    except NotFoundError:
        return None
