"""Data of earlier code is read as it was, to the byte: `fixtures/frozen`, on disk, in Redis and as a backup."""

from __future__ import annotations

import base64
import json
import lzma
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from meshrl.contract.errors import UserError
from meshrl.transferqueue import stores
from meshrl.transferqueue.admin import QueueAdmin, restore_backup
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue

from ...frozen_queue import FROZEN, content, expected, unpacked
from ...redis_server import needs_redis, running

ON_DISK = QueueConfig(store="disk", reserve_bytes=0)


@asynccontextmanager
async def opened(path: Path, config: QueueConfig = ON_DISK) -> AsyncIterator[TransferQueue]:
    store = stores.build(config, path)
    queue = await TransferQueue.open(store)
    assert not (await QueueAdmin(queue, store).verify()).problems
    yield queue
    await queue.close()


async def has_all(queue: TransferQueue, *runs: str) -> None:
    """The queue has each row of `runs` as it was frozen: settled, taken, ready, leased, queued and dead ones."""
    if "long" in runs:
        assert await content(queue, "long", groups=2, leases=True) == expected("long")
    if "tiny" in runs:
        assert await content(queue, "tiny", groups=4, leases=False) == expected("tiny")


async def test_a_store_whose_long_rows_lie_in_lmdb_is_read(tmp_path: Path) -> None:
    async with opened(unpacked("run", tmp_path) / "run" / "queue") as queue:
        await has_all(queue, "tiny", "long")


async def test_a_store_with_a_file_of_frames_is_refused_unchanged(tmp_path: Path) -> None:
    path = unpacked("queue-format-5", tmp_path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(UserError, match=r"format 5, .*: only meshrl at commit c6584707 reads it"):
        await TransferQueue.open(stores.build(ON_DISK, path))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


async def test_a_backup_with_a_file_of_frames_is_refused(tmp_path: Path) -> None:
    backup = unpacked("queue-format-5", tmp_path / "backup")
    store = stores.build(ON_DISK, tmp_path / "restored")
    with pytest.raises(UserError, match=r"format 5, .*: only meshrl at commit c6584707 reads it"):
        await restore_backup(backup, store)
    await store.close()


async def test_a_backup_is_restored(tmp_path: Path) -> None:
    backup = unpacked("backup", tmp_path / "backup")
    store = stores.build(ON_DISK, tmp_path / "restored")
    copied = await restore_backup(backup, store)
    await store.close()
    assert (copied.records, copied.values) == (60, 29)
    async with opened(tmp_path / "restored") as queue:
        await has_all(queue, "tiny")


@needs_redis
async def test_a_redis_store_is_read() -> None:
    stored = json.loads(lzma.decompress((FROZEN / "redis.json.xz").read_bytes()))
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, running(Path(folder)) as server:
        with server.client() as client:
            for key, fields in stored.items():
                values = {
                    base64.b64decode(field): base64.b64decode(value)
                    for field, value in fields.items()
                }
                client.hset(key, mapping=values)
        config = QueueConfig(
            store="redis",
            durability="none",
            redis_url=server.url,
            redis_prefix="frozen",
        )
        async with opened(Path("unused"), config) as queue:
            await has_all(queue, "long")
