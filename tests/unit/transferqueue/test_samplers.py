"""A sampler named by the run decides which complete groups a batch is made of, a user's own included."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from ...contract.queue_actors import Actors, batch_uids, spec, tasks

REVERSE = '''
class Sampler:
    """Last admitted, first taken."""

    def __init__(self):
        self._numbers = set()

    def add(self, group):
        self._numbers.add(group.number)

    def discard(self, number):
        self._numbers.discard(number)

    def first(self, count):
        return sorted(self._numbers, reverse=True)[:count]

    def __len__(self):
        return len(self._numbers)
'''


async def first_batch(sampler: str) -> list[str]:
    """Of three groups: t0 and t1 by version 0, t2 by version 1; all are complete."""
    actors = Actors(await TransferQueue.open(MemoryStore()))
    await actors.start(spec(max_staleness=5.0, sampler=sampler))
    await actors.feed(tasks(3))
    await actors.work(limit=4)
    await actors.publish(1)
    await actors.work()
    batch = batch_uids(await actors.take(1))
    await actors.queue.close()
    return [name.split(".")[0] for name in batch[::2]]


async def test_fifo_takes_what_was_admitted_first() -> None:
    assert await first_batch("fifo") == ["t0", "t1"]


async def test_fresh_first_takes_the_newest_version_first() -> None:
    assert await first_batch("fresh_first") == ["t2", "t0"]


async def test_a_sampler_of_the_users_own_is_named_by_its_dotted_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "my_samplers_for_a_test"
    package.mkdir()
    (package / "reverse.py").write_text(REVERSE)
    monkeypatch.syspath_prepend(tmp_path)
    assert await first_batch("my_samplers_for_a_test.reverse") == ["t2", "t1"]
