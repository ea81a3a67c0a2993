"""The memory store with a bound: what does not fit is in a file, and callers see no difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.contract.errors import CapacityError
from meshrl.testing.contract.queue_actors import Actors, batch_uids, spec, tasks
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import Operation, Table
from meshrl.transferqueue.stores.memory import MemoryStore

from .test_disk_store import file_limit

KIB = 1 << 10


def put(number: int, nbytes: int = KIB) -> Operation:
    return Operation(
        Table.PAYLOAD, number.to_bytes(4, "big"), number.to_bytes(4, "big") * (nbytes // 4)
    )


async def test_the_oldest_payload_goes_to_the_file_and_is_read_from_there(tmp_path: Path) -> None:
    store = MemoryStore(memory_bytes=64 * KIB, folder=tmp_path / "spill")
    for number in range(200):
        await store.apply([put(number), Operation(Table.META, b"%d" % number, b"x")])
        assert store._nbytes <= 64 * KIB
    keys = [put(number).key for number in range(200)]
    assert await store.read([*keys, b"none"]) == [*(put(n).value for n in range(200)), None]
    assert put(0).key in store._spilled and put(199).key not in store._spilled
    await store.apply([Operation(Table.PAYLOAD, keys[0], None), put(1, 2 * KIB)])
    assert await store.read(keys[:2]) == [None, put(1, 2 * KIB).value]
    seen = [op async for piece in store.export() for op in piece if op.table is Table.PAYLOAD]
    assert sorted(seen) == sorted([put(1, 2 * KIB), *(put(n) for n in range(2, 200))])
    await store.close()
    assert not (tmp_path / "spill").exists()


async def test_a_full_disk_refuses_the_commit_whole(tmp_path: Path) -> None:
    store = MemoryStore(memory_bytes=256 * KIB, folder=tmp_path / "spill")
    await store.apply([put(n, 4 * KIB) for n in range(50)])
    with file_limit(64 * KIB), pytest.raises(CapacityError):
        await store.apply([put(n, 4 * KIB) for n in range(50, 100)])
    keys = [put(number).key for number in range(100)]
    assert await store.read(keys) == [*(put(n, 4 * KIB).value for n in range(50)), *[None] * 50]
    await store.apply([put(n, 4 * KIB) for n in range(50, 100)])
    assert None not in await store.read(keys)
    await store.close()


async def test_a_queue_goes_through_the_file(tmp_path: Path) -> None:
    config = QueueConfig(store="memory", memory_bytes=8 * KIB, reserve_bytes=0)
    actors = Actors(await TransferQueue.open(stores.build(config, tmp_path)))
    await actors.start(spec(max_staleness=99.0))
    await actors.feed(tasks(20, extra_info={"filler": "x" * KIB}))
    assert (tmp_path / "spill" / "data.mdb").exists()
    await actors.work()
    batch = await actors.take(0, groups=20)
    rows = await actors.queue.fetch("run", [row.uid for row in batch.rows], ["rollout_logprobs"])
    assert len(batch_uids(batch)) == len(rows) == 40
    await actors.queue.close()
