"""Pictures in a store leave it with their task, are swept after a kill, and are in a backup and under its audit."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshrl.contract import codec
from meshrl.contract.errors import ConfigError, CorruptError, UnavailableError, UserError
from meshrl.contract.picture_store import PictureFolders, PictureStore, folder_of, path_of
from meshrl.contract.types import Media, Outcome, Task
from meshrl.transferqueue.admin import QueueAdmin
from meshrl.transferqueue.operations.audit import Audit, audit
from meshrl.transferqueue.operations.backup import back_up, opened, restore_backup
from meshrl.transferqueue.operations.pictures import UNKNOWN_S, PictureRemover, backed_up, read_back
from meshrl.transferqueue.sharding import ShardedQueue, ShardQueue
from meshrl.transferqueue.stores.disk import DiskStore
from meshrl.transferqueue.stores.memory import MemoryStore

from ...contract.queue_actors import WAIT_S, Actors, rollout_of, spec, task

A, B = Media.of(b"a" * 100), Media.of(b"b" * 60)
LONG = "long/" + "name" * 60
NOBODY = "nobody's"


@pytest.fixture
def folders(tmp_path: Path) -> PictureFolders:
    return PictureFolders(str(tmp_path / "pictures"))


@pytest.fixture
def pictures(folders: PictureFolders) -> PictureStore:
    return PictureStore(folders, inline_bytes=10)


async def open_queue(
    store: Any, folders: PictureFolders, *, alone: bool = True
) -> tuple[ShardQueue, PictureRemover]:
    remover = PictureRemover(folders, alone=alone)
    return await ShardQueue.open(store, pictures=remover), remover


async def admitted(pictures: PictureStore, *names: str) -> Sequence[Task]:
    return await pictures.admitted([task(name, media=(A, B)) for name in names])


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():  # noqa: ASYNC110 # a thread removes
            await asyncio.sleep(0.01)


def at(folders: PictureFolders, *names: str) -> bool:
    return sorted(folders.tasks("run")) == sorted(map(folder_of, names))


async def test_pictures_go_when_their_task_has_left_and_not_before(
    folders: PictureFolders, pictures: PictureStore
) -> None:
    queue, _ = await open_queue(MemoryStore(), folders)
    actors = Actors(queue)
    await actors.start(spec(max_staleness=9.0, max_attempts=1))
    assert await actors.feed(await admitted(pictures, "one", LONG, "three")) == 3
    lease = await actors.lease(limit=4)
    assert lease.rows[0].task.media == (await admitted(pictures, "one"))[0].media
    await actors.write(lease)
    await actors.write(await actors.lease("reward"))
    await actors.train(0)
    assert at(folders, "one", LONG, "three")
    await actors.commit(1)  # the checkpoint has them
    await until(lambda: at(folders, "three"))

    row, other = (await actors.lease()).rows
    await queue.fail("run", "rollout", row.uid, row.token, Outcome.TIMEOUT, "slow")
    await queue.release("run", "rollout", {other.uid: other.token})
    assert await queue.replay("run", [row.uid]) == 1  # from its dead letter, with its pictures
    assert at(folders, "three")
    await actors.work()
    await actors.take(1, groups=1)
    await actors.settle(1)
    assert at(folders, "three")
    await actors.commit(2)
    await queue.close()  # which waits for what has left
    assert at(folders)
    pictures.close()


async def test_a_rewound_row_still_has_its_pictures(
    folders: PictureFolders, pictures: PictureStore
) -> None:
    store = MemoryStore()
    queue, _ = await open_queue(store, folders)
    actors = Actors(queue)
    await actors.start(spec(max_staleness=9.0))
    await actors.feed(await admitted(pictures, "one", "two"))
    rows = (await actors.lease()).rows
    own = codec.pack_media(await pictures.put("run", "one", [Media.of(b"seen" * 9)]))
    writes = [
        replace(made, columns={**made.columns, "row_media": own}) if row.uid.task == "one" else made
        for row in rows
        for made in [rollout_of(row, actors.version)]
    ]
    await queue.write("run", "rollout", {row.uid: row.token for row in rows}, writes)
    await actors.write(await actors.lease("reward"))
    await actors.train(0)
    await actors.queue.acquire("run", "the next trainer")
    actors.epoch += 1
    assert await queue.rewind("run", epoch=actors.epoch, step=0) == 4
    batch = await actors.take(0, name="again")
    uids = [row.uid for row in batch.rows]
    columns = await queue.fetch("run", uids, ["tokens", "media", "row_media"])
    filled = await pictures.filled(uids, columns)
    assert codec.unpack_media(filled[0]["media"]) == (A, B)
    assert codec.unpack_media(filled[0]["row_media"]) == (Media.of(b"seen" * 9),)
    await queue.close()
    pictures.close()


async def test_a_sweep_finds_what_a_kill_left_and_what_came_late(
    folders: PictureFolders, pictures: PictureStore, tmp_path: Path
) -> None:
    """A queue that is killed between the commit and the removal; a worker that writes for a task that has left."""
    store = DiskStore(tmp_path / "queue", durability="none")
    queue = await ShardQueue.open(store, pictures=(killed := PictureRemover(folders, alone=True)))
    actors = Actors(queue)
    await actors.start(spec(max_staleness=9.0))
    await actors.feed(await admitted(pictures, "one", LONG, "three"))
    with killed.held():
        await actors.work(limit=4)
        await actors.train(0)
        await actors.commit(1)
        killed._pending.clear()
        await pictures.put("run", "three", [Media.of(b"late" * 9)])
        await pictures.put("run", "waits for room", [A, B])
        await pictures.put("run", NOBODY, [A, B])
        await queue.close()
    for each in (A, B):
        old = time.time() - UNKNOWN_S - 60
        os.utime(f"{folders.url}/{path_of('run', NOBODY, each.sha256)}", (old, old))
    assert len(folders.tasks("run")) == 5

    store = DiskStore(tmp_path / "queue", durability="none")
    queue, _ = await open_queue(store, folders, alone=False)
    await until(lambda: at(folders, "three", "waits for room", NOBODY))
    await queue.close()
    store = DiskStore(tmp_path / "queue", durability="none")
    queue, _ = await open_queue(store, folders)
    await until(lambda: at(folders, "three", "waits for room"))
    await queue.close()
    assert (await admitted(pictures, "three"))[0].media[0].sha256 in folders.pictures(
        "run", "three"
    )
    pictures.close()


async def test_a_store_that_fails_holds_up_nothing_and_is_asked_again(
    folders: PictureFolders, pictures: PictureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshrl.transferqueue.operations.pictures.RETRY_S", 0.05)
    queue, _ = await open_queue(MemoryStore(), folders)
    actors = Actors(queue)
    await actors.start(spec(max_staleness=9.0))
    await actors.feed(await admitted(pictures, "one", "two"))
    remove, asked = folders.remove, []

    def fails(run: str, folder: str) -> None:
        asked.append(folder)
        if len(asked) < 4:
            raise UnavailableError("the store is away")
        remove(run, folder)

    monkeypatch.setattr(folders, "remove", fails)
    await actors.work()
    await actors.train(0)
    await actors.commit(1)
    assert await actors.resident() == {}
    await until(lambda: at(folders))
    await queue.close()
    pictures.close()


async def test_shards_sweep_their_own_tasks(
    folders: PictureFolders, pictures: PictureStore
) -> None:
    removers = [PictureRemover(folders, alone=False) for _ in range(2)]
    shards = [await ShardQueue.open(MemoryStore(), pictures=each) for each in removers]
    actors = Actors(ShardedQueue(shards))
    await actors.start(spec(max_staleness=99.0))
    names = [f"t{number}" for number in range(8)]
    await actors.feed(await admitted(pictures, *names))
    for remover in removers:
        await remover._sweep()
        assert not remover._pending
    await actors.work()
    for step in range(4):
        await actors.train(step)
    await actors.commit(4)
    await until(lambda: at(folders))
    for shard in shards:
        await shard.close()
    pictures.close()


async def test_a_queue_without_the_store_refuses_what_it_could_not_remove(
    folders: PictureFolders, pictures: PictureStore
) -> None:
    queue = await ShardQueue.open(MemoryStore())
    actors = Actors(queue)
    await actors.start()
    with pytest.raises(UserError, match=r"'one' has pictures in a store, .* data\.media_store"):
        await actors.feed(await admitted(pictures, "one"))
    await queue.close()
    pictures.close()


async def backup_of(admin: QueueAdmin, folder: Path) -> Audit:
    async with aclosing(admin.export()) as pieces:
        await back_up(pieces, folder)
    store = opened(folder)
    await store.load()
    try:
        async with aclosing(store.export()) as exported:
            return await audit(exported)
    finally:
        await store.close()


async def test_a_backup_has_the_pictures_and_can_be_restored_elsewhere(
    folders: PictureFolders, pictures: PictureStore, tmp_path: Path
) -> None:
    store = MemoryStore()
    queue, remover = await open_queue(store, folders)
    actors = Actors(queue)
    await actors.start(spec(max_staleness=9.0))
    await actors.feed(await admitted(pictures, "one", LONG, "three"))
    await actors.work(limit=4)
    admin = QueueAdmin(queue, store, remover)
    found = await backup_of(admin, tmp_path / "backup")
    assert found.problems == []
    live = await admin.verify()
    assert live.problems == []
    assert (live.values, live.records) == (found.values, found.records)  # pictures count

    # What leaves while it is copied is in it, too.
    async with aclosing(admin.export()) as pieces:
        first = [await anext(pieces)]
        await actors.train(0)
        await actors.commit(1)
        rest = [piece async for piece in pieces]
    kept = [read_back(v or b"")[0] for piece in rest for _, k, v in piece if k.startswith(b"p")]
    assert len(kept) == 6 and first
    await until(lambda: at(folders, "three"))

    folders._store.remove(path_of("run", "three", A.sha256))
    lost = await admin.verify()
    assert [problem for problem in lost.problems if A.sha256[:12] in problem] == lost.problems != []
    await queue.close()

    with pytest.raises(ConfigError, match=r"the backup has pictures .*data\.media_store"):
        await restore_backup(tmp_path / "backup", MemoryStore())
    elsewhere = PictureFolders(str(tmp_path / "elsewhere"))
    restored = MemoryStore()
    await restore_backup(tmp_path / "backup", restored, elsewhere)
    assert at(elsewhere, "one", LONG, "three")
    queue, _ = await open_queue(restored, elsewhere)
    actors = Actors(queue)
    reader = PictureStore(elsewhere, inline_bytes=10)
    row = (await actors.lease()).rows[0]
    assert await reader.get("run", row.uid.task, row.task.media) == (A, B)
    await queue.close()
    reader.close()
    pictures.close()


def test_a_damaged_picture_of_a_backup_goes_nowhere(tmp_path: Path) -> None:
    for path in ("../../x/" + A.sha256, "run/../" + A.sha256, "run/t/" + B.sha256):
        with pytest.raises(CorruptError, match=r"is no path|other data than its name"):
            name, data = read_back(backed_up(path, A.data).value or b"")
            PictureFolders(str(tmp_path)).put_back(name, data)
