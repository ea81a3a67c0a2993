"""Frames that were just written are served from RAM; the store is asked for the others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from meshrl.contract.errors import CapacityError
from meshrl.testing.contract.queue_actors import Actors, rollout_of, spec, tasks, tokens_of
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import FRAME, Operation, RecentFrames, Table
from tests.doubles.gated_store import GatedStore


class CountingStore(GatedStore):
    """Counts the frames that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.frames_read = 0

    async def read(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        self.frames_read += sum(key.startswith(FRAME) for key in keys)
        return await super().read(keys)


@pytest.fixture
async def store() -> AsyncIterator[CountingStore]:
    made = CountingStore()
    yield made
    await made.close()


async def opened(store: CountingStore, cache_bytes: int) -> Actors:
    queue = await TransferQueue.open(store, cache_bytes=cache_bytes, recovery_pause_s=0.01)
    return Actors(queue)


async def trained(actors: Actors) -> None:
    """One batch, from its prompts to its fetch."""
    await actors.start(spec(max_staleness=9.0))
    await actors.feed(tasks(2))
    await actors.work()
    batch = await actors.take(0)
    rows = [row.uid for row in batch.rows]
    found = await actors.queue.fetch_rows("run", rows, ["tokens", "reward"])
    assert len(found) == 4 and all(len(row["tokens"]) == 6 for row in found)


@pytest.mark.parametrize("cache_bytes, reads", [(1 << 20, False), (0, True)])
async def test_a_row_goes_through_its_stages_without_being_read_from_the_store(
    store: CountingStore, cache_bytes: int, reads: bool
) -> None:
    actors = await opened(store, cache_bytes)
    await trained(actors)
    assert (store.frames_read > 0) == reads
    await actors.queue.close()


async def test_a_queue_that_was_opened_again_reads_what_is_stored(store: CountingStore) -> None:
    actors = await opened(store, 1 << 20)
    await trained(actors)
    await actors.queue.close()
    again = await opened(store, 1 << 20)
    epoch = (await again.queue.acquire("run", "trainer")).epoch
    batch = await again.queue.take("run", epoch=epoch, step=0, groups=2, batch_id="0", wait_s=0.0)
    await again.queue.fetch_rows("run", [row.uid for row in batch.rows], ["tokens"])
    assert store.frames_read > 0
    await again.queue.close()


async def test_what_a_refused_commit_held_is_not_served(store: CountingStore) -> None:
    actors = await opened(store, 1 << 20)
    await actors.start(spec(max_staleness=9.0))
    await actors.feed(tasks(2))
    lease = await actors.lease()
    store.refusal = CapacityError("the disk is full")
    longer = [rollout_of(row, actors.version, tokens=7) for row in lease.rows]
    with pytest.raises(CapacityError):
        await actors.queue.write_rows("run", lease.stage, tokens_of(lease), longer)
    store.refusal = None
    await actors.write(lease)
    await actors.write(await actors.lease("reward"))
    batch = await actors.take(0)
    found = await actors.queue.fetch_rows("run", [row.uid for row in batch.rows], ["tokens"])
    assert [len(row["tokens"]) for row in found] == [6] * 4
    assert store.frames_read == 0
    await actors.queue.close()


def test_the_oldest_stay_until_they_are_deleted_and_make_room() -> None:
    frames = RecentFrames(limit=10)
    keys = [FRAME + bytes([number]) for number in range(4)]

    def put(key: bytes, value: bytes | None, table: Table = Table.PAYLOAD) -> None:
        frames.committed([Operation(table, key, value)])

    put(keys[0], b"1234")
    put(keys[1], b"123456")
    put(keys[2], b"1")
    assert frames.recall(keys) == {keys[0]: b"1234", keys[1]: b"123456"}
    put(keys[0], None)
    put(keys[3], b"12345")
    put(keys[2], b"4321")
    put(b"task", b"")
    put(keys[3], b"", Table.META)
    assert frames.recall([*keys, b"task"]) == {keys[1]: b"123456", keys[2]: b"4321"}
    put(keys[1], b"1234567")  # it has no room any more
    assert frames.recall(keys) == {keys[2]: b"4321"}
    frames.forget()
    put(keys[0], b"1234567890")
    assert frames.recall(keys) == {keys[0]: b"1234567890"}
