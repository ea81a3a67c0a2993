"""The disk store: growth, reuse, ownership, refusals, and a disk that is full."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import lmdb
import pytest

from meshrl.contract.errors import (
    BrokenDiskError,
    BusyError,
    CapacityError,
    ConfigError,
    CorruptError,
    UserError,
)
from meshrl.testing.contract.queue_actors import Actors, spec, tasks
from meshrl.transferqueue import stores
from meshrl.transferqueue.admin import QueueAdmin
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import Operation, Table
from meshrl.transferqueue.stores._lmdb import Snapshot
from meshrl.transferqueue.stores.disk import STAMP, DiskStore

from ...waiting import until
from .rewritten import rewrite

MIB = 1 << 20


def puts(count: int, nbytes: int = MIB // 16) -> list[Operation]:
    return [
        Operation(Table.PAYLOAD, number.to_bytes(4, "big"), bytes(nbytes))
        for number in range(count)
    ]


@contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `nbytes`: a full disk that needs no root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_the_map_grows_while_it_is_in_use(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, grow_bytes=MIB)
    await store.load()
    await store.apply(puts(160))
    values = await store.read([number.to_bytes(4, "big") for number in range(161)])
    assert [len(value) for value in values[:160] if value] == [MIB // 16] * 160
    assert values[160] is None
    await store.close()
    again = DiskStore(tmp_path, grow_bytes=MIB)
    await again.load()
    assert (await again.read([bytes(4)]))[0] is not None
    await again.close()


async def test_freed_space_is_used_again(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    await store.load()
    sizes: list[int] = []
    for _ in range(12):
        operations = puts(64)
        await store.apply(operations)
        await store.apply([Operation(op.table, op.key, None) for op in operations])
        sizes.append((tmp_path / "data.mdb").stat().st_size)
    assert sizes[-1] == sizes[3]
    await store.close()


async def test_one_queue_at_a_time_owns_a_folder(tmp_path: Path) -> None:
    first = await TransferQueue.open(DiskStore(tmp_path))
    with pytest.raises(UserError, match=f"process {os.getpid()}"):
        await TransferQueue.open(DiskStore(tmp_path))
    await first.close()
    await (await TransferQueue.open(DiskStore(tmp_path))).close()


async def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot keep a queue at"):
        await TransferQueue.open(DiskStore(tmp_path / "file" / "queue"))


async def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    await (await TransferQueue.open(DiskStore(tmp_path))).close()
    with lmdb.open(str(tmp_path), max_dbs=2) as environment:
        meta = environment.open_db(b"meta")
        with environment.begin(db=meta, write=True) as transaction:
            transaction.put(STAMP, json.dumps({"format": 99}).encode())
    with pytest.raises(UserError, match=r"format 99, this meshrl reads format 6"):
        await TransferQueue.open(DiskStore(tmp_path))


async def test_a_file_that_is_no_store_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"not a store" * 4096)
    with pytest.raises(CorruptError, match="no readable queue store"):
        await TransferQueue.open(DiskStore(tmp_path))


async def test_a_record_that_was_changed_on_disk_is_corrupt(tmp_path: Path) -> None:
    actors = Actors(await TransferQueue.open(DiskStore(tmp_path)))
    await actors.start()
    await actors.feed(tasks(1))
    await actors.queue.close()
    await rewrite(tmp_path, "meta", b"g", b"12345678[]")
    with pytest.raises(CorruptError, match="checksum"):
        await TransferQueue.open(DiskStore(tmp_path))


async def test_a_full_disk_is_a_clear_error_and_the_run_goes_on(tmp_path: Path) -> None:
    actors = Actors(await TransferQueue.open(DiskStore(tmp_path)))
    await actors.start(spec(max_staleness=999.0))
    await actors.feed(tasks(1))
    lease = await actors.lease()
    big = tasks(40, start=1, extra_info={"filler": "x" * MIB})
    with file_limit(4 * MIB), pytest.raises(CapacityError, match="took no more"):
        await actors.feed(big)
    assert await actors.resident() == {"leased": 2}
    await actors.write(lease)
    assert await actors.feed(big) == 40
    await actors.queue.close()
    actors.queue = await TransferQueue.open(DiskStore(tmp_path))
    assert await actors.resident() == {"pending": 2, "queued": 80}
    await actors.queue.close()


async def test_rows_may_not_use_the_reserve_but_may_leave(tmp_path: Path) -> None:
    actors = Actors(await TransferQueue.open(DiskStore(tmp_path)))
    await actors.start()
    await actors.feed(tasks(2))
    await actors.work()
    await actors.queue.close()
    actors.queue = await TransferQueue.open(DiskStore(tmp_path, reserve_bytes=1 << 60))
    with pytest.raises(CapacityError, match="bytes free on disk"):
        await actors.feed(tasks(2, start=2))
    await actors.train(0)
    await actors.commit(1)
    assert (await actors.ledger()).trained == 4
    await actors.queue.close()


def test_an_unknown_store_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'disk'\? \(known: disk, memory"):
        stores.build(QueueConfig(store="dsik"), tmp_path)


async def test_the_path_of_the_config_wins(tmp_path: Path) -> None:
    config = QueueConfig(path=tmp_path / "mine")
    await (await TransferQueue.open(stores.build(config, tmp_path / "run"))).close()
    assert (tmp_path / "mine" / "data.mdb").exists()
    assert not (tmp_path / "run").exists()


async def exported(store: DiskStore) -> tuple[list[Operation], AsyncGenerator[Sequence[Operation]]]:
    """The first piece of an export, and the export, which nobody reads on."""
    pieces = store.export()
    return [*await anext(pieces)], pieces


async def test_a_reader_of_an_export_that_stops_holds_no_commit_up(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, grow_bytes=MIB)
    await store.load()
    await store.apply(puts(200))
    files = sorted(each.name for each in await asyncio.to_thread(lambda: [*tmp_path.iterdir()]))
    first, pieces = await exported(store)
    async with asyncio.timeout(60):
        for start in range(0, 1600, 160):
            later = [(2**16 + start + n).to_bytes(4, "big") for n in range(160)]
            await store.apply([Operation(Table.PAYLOAD, key, bytes(MIB // 16)) for key in later])
    rest = [operation async for piece in pieces for operation in piece]
    assert len(first) + len(rest) == 200, "one moment: what was there when it began"
    assert (
        sorted(each.name for each in await asyncio.to_thread(lambda: [*tmp_path.iterdir()]))
        == files
    )
    await store.close()


async def test_a_slow_export_keeps_no_freed_page_from_being_used_again(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    await store.load()
    await store.apply(puts(200))
    _, pieces = await exported(store)
    sizes: list[int] = []
    for _ in range(12):
        await store.apply(puts(200))
        sizes.append((tmp_path / "data.mdb").stat().st_size)
    assert sizes[-1] == sizes[3]
    await pieces.aclose()
    await store.close()


async def test_stalled_backups_make_two_copies_and_the_next_is_refused(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    queue = await TransferQueue.open(store)
    await store.apply(puts(200))
    admin = QueueAdmin(queue, store)
    stalled = [admin.export() for _ in range(2)]
    for pieces in stalled:
        await anext(pieces)
    assert len(copies(tmp_path)) == 2
    with pytest.raises(BusyError, match="2 backups or audits of this queue run"):
        await anext(admin.export())
    with pytest.raises(BusyError, match="try again when one has ended"):
        await admin.verify()
    await stalled[0].aclose()
    assert len([piece async for piece in admin.export()])
    await stalled[1].aclose()
    assert not copies(tmp_path)
    await queue.close()


def copies(folder: Path) -> list[str]:
    """Copies that this process has open, or that exist by name."""
    found = [str(each) for each in folder.glob("export-*")]
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of this very listing
            found.append(str(each.readlink()))
    return [each for each in found if each.startswith(f"{folder}/export-")]


async def test_a_map_does_not_grow_while_an_export_that_was_cancelled_still_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path, grow_bytes=MIB)
    await store.load()
    copying, go_on = threading.Event(), threading.Event()
    copy = Snapshot._begin

    def slowly(snapshot: Snapshot, environment: lmdb.Environment, folder: Path) -> None:
        copying.set()
        go_on.wait()
        copy(snapshot, environment, folder)

    monkeypatch.setattr(Snapshot, "_begin", slowly)
    reading = asyncio.ensure_future(exported(store))
    await until(copying.is_set)
    reading.cancel()
    growing = asyncio.create_task(store.apply(puts(200)))
    for _ in range(20):
        await asyncio.sleep(0.01)
    assert not growing.done()
    go_on.set()
    await growing
    with suppress(asyncio.CancelledError):
        await reading
    assert not copies(tmp_path)
    await store.close()


async def test_an_export_whose_copy_does_not_fit_is_refused_at_once(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, reserve_bytes=1 << 60)
    await store.load()
    await store.apply(puts(20))
    with pytest.raises(CapacityError, match=r"no room for the copy .* bytes free on disk"):
        await exported(store)
    await store.apply(puts(20))
    assert not copies(tmp_path)
    await store.close()


async def test_a_queue_closes_while_an_export_is_not_read(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    await store.load()
    await store.apply(puts(200))
    first, pieces = await exported(store)
    async with asyncio.timeout(60):
        await store.close()
    rest = [operation async for piece in pieces for operation in piece]
    assert len(first) + len(rest) == 200


async def test_the_copy_that_a_killed_export_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "export-abc").mkdir()
    (tmp_path / "export-abc" / "data.mdb").write_bytes(b"half of it")
    store = DiskStore(tmp_path)
    await store.load()
    assert not (tmp_path / "export-abc").exists()
    await store.close()


def fails(*_: object) -> None:
    """A commit as LMDB reports one that the disk did not take."""
    raise lmdb.Error("mdb_txn_commit: Input/output error")


async def test_a_disk_that_fails_and_has_room_ends_the_queue_and_nothing_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors = Actors(await TransferQueue.open(DiskStore(tmp_path)))
    await actors.start()
    await actors.feed(tasks(1))
    lease = await actors.lease()

    with monkeypatch.context() as broken:
        broken.setattr(DiskStore, "_commit", fails)
        with pytest.raises(BrokenDiskError, match="failed to write, and has room"):
            await actors.write(lease)
    assert isinstance(await actors.queue.lost(), BrokenDiskError)
    with pytest.raises(BrokenDiskError):
        await actors.feed(tasks(1, start=1))
    await actors.queue.close()
    actors.queue = await TransferQueue.open(DiskStore(tmp_path))
    assert await actors.resident() == {"leased": 2}
    await actors.queue.close()


async def test_a_write_that_a_limit_of_file_sizes_cuts_short_is_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path)
    await store.load()

    monkeypatch.setattr(DiskStore, "_commit", fails)
    with file_limit(4 * MIB), pytest.raises(CapacityError, match="took no more"):
        await store.apply(puts(1))
    await store.close()
