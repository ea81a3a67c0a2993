"""A store of a queue of several processes is refused before it is opened: alone it would lose the others' rows.

`fixtures/queue-of-two.tar.gz` is the run directory of a queue of two, and its backup, made at commit c6584707.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from tempfile import TemporaryDirectory

import lmdb
import pytest

from meshrl.contract.errors import UserError
from meshrl.testing.contract.queue_actors import Actors, tasks
from meshrl.transferqueue.admin import back_up, opened, restore_backup
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.several_processes import processes_noted
from meshrl.transferqueue.store import Table, encode_record
from meshrl.transferqueue.stores import redis as redis_store
from meshrl.transferqueue.stores.disk import DiskStore
from meshrl.transferqueue.stores.memory import MemoryStore

from ...redis_server import needs_redis, running

ARCHIVE = Path(__file__).parents[2] / "fixtures" / "queue-of-two.tar.gz"
REFUSED = "a run on several continues with the meshrl of commit c6584707"


@pytest.fixture
def two(tmp_path: Path) -> Path:
    shutil.unpack_archive(ARCHIVE, tmp_path)
    return tmp_path


def meta_of(path: Path) -> list[tuple[bytes, bytes]]:
    environment = lmdb.open(str(path), readonly=True, lock=False, max_dbs=len(Table))
    try:
        table = environment.open_db(Table.META.encode(), create=False)
        with environment.begin(db=table) as transaction:
            return list(transaction.cursor())
    finally:
        environment.close()


@pytest.mark.parametrize("name", ["queue", "queue-1", "backup/queue-0", "backup/queue-1"])
async def test_each_store_of_two_is_refused_and_stays_as_it_is(two: Path, name: str) -> None:
    folder = (two if "/" in name else two / "runs/run") / name
    before = (folder / "data.mdb").read_bytes()
    with pytest.raises(UserError, match=REFUSED):
        await TransferQueue.open(DiskStore(folder))
    assert (folder / "data.mdb").read_bytes() == before


@pytest.mark.parametrize("part", ["", "queue-0", "queue-1"])
async def test_a_backup_of_two_is_not_restored(two: Path, part: str) -> None:
    store = MemoryStore()
    with pytest.raises(UserError, match=REFUSED):
        await restore_backup(two / "backup" / part, store)
    assert not await store.load()


async def test_a_store_beside_two_that_is_none_of_them_opens(two: Path) -> None:
    queue = await TransferQueue.open(DiskStore(two / "runs/run/queue-2"))
    await queue.close()


async def test_a_store_of_one_opens_again_and_goes_through_a_backup(tmp_path: Path) -> None:
    for _ in range(2):
        store = DiskStore(tmp_path / "queue-1")
        actors = Actors(await TransferQueue.open(store))
        await actors.start()
        await actors.feed(tasks(2))
        await actors.queue.close()  # type: ignore[attr-defined]
    store = DiskStore(tmp_path / "queue-1")
    await store.load()
    async with aclosing(store.export()) as pieces:
        await back_up(pieces, tmp_path / "queue-0")
    await store.close()
    copy = opened(tmp_path / "queue-0")
    assert await copy.load()
    await copy.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(ignore_cleanup_errors=True) as name:
        yield Path(name)


@needs_redis
@pytest.mark.parametrize(("name", "prefix"), [("queue", "q"), ("queue", "q-1"), ("queue-1", "q-1")])
async def test_keys_of_two_in_redis_are_refused_and_stay_as_they_are(
    two: Path, folder: Path, name: str, prefix: str
) -> None:
    with running(folder / "r") as server, server.client() as client:
        for at, stored in ((prefix, name), ("q", "queue")):
            fields = dict(meta_of(two / "runs/run" / stored))
            client.hset(f"meshrl:{{{at}}}:meta", mapping=fields)  # type: ignore[arg-type]
        keys = set(client.keys("*"))
        config = QueueConfig(
            store="redis",
            redis_url=server.url,
            redis_prefix=prefix,
            durability="none",
        )
        with pytest.raises(UserError, match=REFUSED):
            await TransferQueue.open(redis_store.build(config, Path("unused")))
        assert set(client.keys("*")) == keys


@pytest.mark.parametrize(
    ("run", "cursor", "processes"),
    [
        ("run.shards", "2 2", 2),
        ("run.shards", "1 3", 3),
        ("run.shards", "1 1", 1),
        (".shards", "queue 0 shard a:1 b:2 c:3", 3),
        (".shards", "queue 2 shard", 3),
        ("run", "2 2", 1),
        ("own.shards", '{"epoch": 1}', 1),
        ("own.shards", "", 1),
    ],
)
def test_a_note_says_how_many_processes_a_queue_is(run: str, cursor: str, processes: int) -> None:
    records = [
        (b"r0000", encode_record({"run": run})),
        (b"s0000", encode_record({"cursor": cursor})),
    ]
    assert processes_noted(records) == processes
    assert processes_noted([(key, b"damaged") for key, _ in records]) == 1
