"""Backup, restore and audit on every store, with rows in every state, and with damaged records."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from tempfile import TemporaryDirectory

import lmdb
import pytest

from meshrl.contract.errors import CapacityError, ConflictError, NotFoundError, UserError
from meshrl.contract.frames import with_checksum
from meshrl.contract.types import Audit, Outcome
from meshrl.testing.contract.queue_actors import Actors, spec, tasks
from meshrl.transferqueue import stores
from meshrl.transferqueue.admin import PARTIAL, QueueAdmin, audit, back_up, opened, restore_backup
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import Operation, Store, Table
from meshrl.transferqueue.stores.disk import STAMP, DiskStore
from meshrl.transferqueue.stores.memory import MemoryStore

from ...redis_server import needs_redis, running
from .rewritten import rewrite
from .test_disk_store import file_limit

MakeStore = Callable[[str], Store]


@pytest.fixture(params=["memory", "disk", pytest.param("redis", marks=needs_redis)])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeStore]:
    if request.param != "redis":
        config = QueueConfig(store=request.param, reserve_bytes=0)
        yield lambda name: stores.build(config, tmp_path / name)
        return
    with TemporaryDirectory() as folder, running(Path(folder)) as server:
        yield lambda name: stores.build(
            QueueConfig(store="redis", durability="none", redis_url=server.url, redis_prefix=name),
            tmp_path,
        )


async def in_every_state(store: Store) -> Actors:
    """Settled, taken, ready, pending, leased, queued, filtered and dead rows."""
    actors = Actors(await TransferQueue.open(store))
    await actors.start(spec(max_staleness=99.0, max_attempts=1))
    await actors.feed(tasks(12), cursor="twelve")
    await actors.work(limit=8)
    await actors.train(0)
    batch = await actors.take(1)
    await actors.queue.filter("run", epoch=actors.epoch, uids=[batch.rows[0].uid], reason="easy")
    await actors.work(limit=2)
    await actors.write(await actors.lease(limit=2))
    row = (await actors.lease(limit=1)).rows[0]
    await actors.queue.fail("run", "rollout", row.uid, row.token, Outcome.TIMEOUT, "slow")
    await actors.lease(limit=2)
    return actors


async def copy(store: Store, folder: Path) -> None:
    async with aclosing(store.export()) as pieces:
        await back_up(pieces, folder)


async def audit_of(folder: Path) -> Audit:
    store = DiskStore(folder)
    await store.load()
    try:
        async with aclosing(store.export()) as pieces:
            return await audit(pieces)
    finally:
        await store.close()


async def test_a_running_queue_is_copied_and_goes_on_from_the_copy(
    make_store: MakeStore, tmp_path: Path
) -> None:
    store = make_store("first")
    actors = await in_every_state(store)
    before = await actors.ledger()
    await copy(store, tmp_path / "backup")
    await actors.feed(tasks(2, start=20))
    await actors.queue.close()
    assert not (tmp_path / f"backup{PARTIAL}").exists()

    result = await audit_of(tmp_path / "backup")
    assert result.problems == []
    assert result.ledgers == {"run": before}

    target = make_store("second")
    await restore_backup(tmp_path / "backup", target)
    await target.close()
    actors.queue = await TransferQueue.open(
        target if type(target).__name__ == "MemoryStore" else make_store("second")
    )
    assert await actors.ledger() == before
    assert (await actors.queue.run_state("run")).cursor == "twelve"
    taken = await actors.take(1)
    assert len(await actors.queue.fetch_rows("run", [taken.rows[1].uid], ["tokens"])) == 1
    await actors.queue.close()


async def test_a_copy_shows_one_moment_while_the_queue_works(
    make_store: MakeStore, tmp_path: Path
) -> None:
    store = make_store("first")
    actors = Actors(await TransferQueue.open(store))
    await actors.start(spec(max_staleness=999.0))
    await actors.feed(tasks(20))

    async def work() -> None:
        for number in range(40):
            await actors.feed(tasks(2, start=100 + 2 * number))
            await actors.work(limit=8)

    working = asyncio.create_task(work())
    for number in range(3):
        await copy(store, tmp_path / f"backup{number}")
    await working
    for number in range(3):
        assert (await audit_of(tmp_path / f"backup{number}")).problems == []
    verified = await QueueAdmin(actors.queue, store).verify()
    assert verified.problems == []
    assert verified.ledgers == {"run": await actors.ledger()}
    await actors.queue.close()


async def test_nothing_is_overwritten(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store("first")
    actors = await in_every_state(store)
    await copy(store, tmp_path / "backup")
    with pytest.raises(ConflictError, match="never overwrites"):
        await copy(store, tmp_path / "backup")
    await actors.queue.close()
    if type(store).__name__ != "MemoryStore":
        store = make_store("first")
    with pytest.raises(ConflictError, match="holds a queue already"):
        await restore_backup(tmp_path / "backup", store)
    await store.close()


async def test_a_backup_with_pictures_of_a_store_is_refused(tmp_path: Path) -> None:
    source = MemoryStore()
    actors = await in_every_state(source)
    copied = [piece async for piece in source.export()]
    picture = Operation(Table.PAYLOAD, b"p" + bytes(32), with_checksum(b"run/t/name", b"data"))

    async def pieces() -> AsyncIterator[Sequence[Operation]]:
        for piece in [*copied, [picture]]:
            yield piece

    await back_up(pieces(), tmp_path / "backup")
    await actors.queue.close()
    store = MemoryStore()
    with pytest.raises(UserError, match=r"has pictures of data\.media_store.* commit 9121209e"):
        await restore_backup(tmp_path / "backup", store)
    assert await store.load() == []


async def test_a_backup_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "queue")
    actors = Actors(await TransferQueue.open(store))
    await actors.start(spec(max_staleness=99.0))
    await actors.feed(tasks(40, extra_info={"filler": "x" * (1 << 18)}))
    with file_limit(1 << 20), pytest.raises(CapacityError):
        await copy(store, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()
    assert not (tmp_path / f"backup{PARTIAL}").exists()
    await copy(store, tmp_path / "backup")
    await actors.queue.close()


async def test_what_is_no_backup_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="holds no backup"):
        opened(tmp_path)
    actors = await in_every_state(store := DiskStore(tmp_path / "queue"))
    await copy(store, tmp_path / "backup")
    await actors.queue.close()
    stamp = json.dumps({"format": 99}).encode()
    with lmdb.open(str(tmp_path / "backup"), max_dbs=2) as environment:
        meta = environment.open_db(b"meta")
        with environment.begin(db=meta, write=True) as transaction:
            transaction.put(STAMP, stamp)
    with pytest.raises(UserError, match="format 99"):
        await restore_backup(tmp_path / "backup", DiskStore(tmp_path / "new"))


@pytest.mark.parametrize(
    ("table", "kind", "value", "problem"),
    [
        ("payload", b"c", b"12345678 not what was written", "do not match their checksum"),
        ("payload", b"c", None, "columns of run/t.*: not stored"),
        ("payload", b"t", None, "task run/t0: not stored"),
        ("payload", b"m", None, "manifest of batch b0: not stored"),
        ("meta", b"g", b"12345678[]", "do not match their checksum"),
        ("meta", b"g", None, "does not balance"),
        ("meta", b"n", None, "resident and was never admitted"),
        ("meta", b"d", None, "belongs to no row"),
    ],
)
async def test_the_audit_finds_what_was_damaged(
    tmp_path: Path, table: str, kind: bytes, value: bytes | None, problem: str
) -> None:
    actors = await in_every_state(DiskStore(tmp_path))
    await actors.queue.close()
    assert (await audit_of(tmp_path)).problems == []
    await rewrite(tmp_path, table, kind, value)
    result = await audit_of(tmp_path)
    assert any(re.search(problem, each) for each in result.problems), result.problems


async def test_a_queue_whose_memory_and_store_differ_is_reported(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    actors = await in_every_state(store)
    admin = QueueAdmin(actors.queue, store)
    assert (await admin.verify()).problems == []
    actors.queue.open_runs[0].ledger.admitted += 1
    (result,) = (await admin.verify()).problems
    assert result.startswith("run run: the queue reports Ledger(run='run', admitted=25")
    await actors.queue.close()
