"""Pictures that are too large for the queue's messages: named by content in a store, checked when they come back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from meshrl.contract import codec
from meshrl.contract.errors import ConfigError, CorruptError, UnavailableError, UserError
from meshrl.contract.picture_store import (
    LONGEST_FOLDER,
    REFRESH_S,
    PictureFolders,
    PictureStore,
    folder_of,
    name_of,
    path_of,
)
from meshrl.contract.rows import media_of_row, own_media, trajectory
from meshrl.contract.types import MEDIA, ROW_MEDIA, Media, Task, Uid
from meshrl.contract.types.rows import MOST_STORED

A, B = Media.of(b"a" * 100), Media.of(b"b" * 60)
UID = Uid("run", "t", 0)
WRITER = """
import os, sys
from meshrl.contract.types import Media
from meshrl.contract.picture_store import PictureFolders
folders = PictureFolders(sys.argv[1])
while True:
    folders.write("run", "t", Media.of(os.urandom(1 << 20)))
"""


@pytest.fixture(params=["path", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "path" else f"memory://{uuid.uuid4().hex}"


def store_of(folders: PictureFolders, **options: float) -> PictureStore:
    return PictureStore(folders, inline_bytes=120, **options)  # type: ignore[arg-type]


class Counting(PictureFolders):
    """Counts, and fails as often as it is told."""

    reads = writes = failures = 0
    hangs = False

    def read(self, run: str, task: str, media: Media) -> Media:
        self.reads += 1
        if self.hangs:
            time.sleep(0.5)
        if self.failures:
            self.failures -= 1
            raise UnavailableError("the store is away")
        return super().read(run, task, media)

    def write(self, run: str, task: str, media: Media) -> None:
        self.writes += 1
        super().write(run, task, media)


async def test_small_pictures_stay_in_messages_and_large_ones_are_named(url: str) -> None:
    folders = Counting(url)
    store = store_of(folders)
    assert await store.put("run", "t", (A,)) == (A,)
    assert folders.tasks("run") == []
    sent = await store.put("run", "t", (A, B, A))
    assert [(each.sha256, each.data, each.stored_bytes) for each in sent] == [
        (A.sha256, b"", 100),
        (B.sha256, b"", 60),
        (A.sha256, b"", 100),
    ]
    assert folders.pictures("run", "t") == {A.sha256: 100, B.sha256: 60}
    assert folders.writes == 2  # each once
    assert await store.put("run", "t", (A, B)) == sent[:2]
    assert folders.writes == 2  # this process has written them
    other = store_of(folders)
    assert await other.get("run", "t", sent) == (A, B, A)
    folders.remove("run", folder_of("t"))
    assert folders.tasks("run") == []
    folders.remove("run", folder_of("t"))  # once more is as once
    store.close()
    other.close()


async def test_the_rows_of_a_group_read_a_picture_once_and_the_cache_is_bounded(url: str) -> None:
    folders = Counting(url)
    store = store_of(folders, cached_bytes=120)
    sent = await store.put("run", "t", (A, B))
    found = await asyncio.gather(*(store.get("run", "t", sent) for _ in range(8)))
    assert set(found) == {(A, B)}
    assert folders.reads == 2
    await store.get("run", "t", sent[1:])
    before = folders.reads
    assert await store.get("run", "t", sent[1:]) == (B,)
    assert folders.reads == before
    await store.get("run", "t", sent[:1])
    assert folders.reads == before + 1  # both are 160 bytes
    store.close()


async def test_what_is_not_there_or_is_another_picture_is_corrupt(url: str) -> None:
    folders = PictureFolders(url)
    store = store_of(folders)
    sent = await store.put("run", "t", (A, B))
    folders._store.write(path_of("run", "t", A.sha256), B.data)
    folders._store.write(path_of("run", "t", B.sha256), B.data + b"more")
    for each in sent:
        with pytest.raises(CorruptError, match="other data than its name says"):
            await store.get("run", "t", (each,))
    with pytest.raises(CorruptError, match="is missing"):
        await store.get("run", "other", sent)
    for size, why in ((MOST_STORED + 1, "of pictures, at most"), (17 << 20, "bytes, at most")):
        with pytest.raises(CorruptError, match=why):
            await store.get("run", "t", (Media(sha256=A.sha256, data=b"", stored_bytes=size),))
    huge = (Media.of(bytes(MOST_STORED + 1)),)
    with pytest.raises(UserError, match=f"of pictures, at most {MOST_STORED}"):
        await store.put("run", "t", huge)
    store.close()


async def test_a_store_that_fails_is_asked_again_and_one_that_hangs_is_given_up(url: str) -> None:
    folders = Counting(url)
    store = store_of(folders)
    sent = await store.put("run", "t", (A, B))
    folders.failures = 2
    assert await store.get("run", "t", sent) == (A, B)
    for failures, hangs in ((99, False), (0, True)):
        folders.failures, folders.hangs = failures, hangs
        late = store_of(folders, give_up_s=0.2)
        with pytest.raises(UnavailableError, match=r"store is away|has not answered for"):
            await late.get("run", "t", sent)
        late.close()
    store.close()


class Meeting(PictureFolders):
    """Each read and write waits for another one."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.both = threading.Barrier(2, timeout=30)

    def read(self, run: str, task: str, media: Media) -> Media:
        self.both.wait()
        return super().read(run, task, media)

    def write(self, run: str, task: str, media: Media) -> None:
        self.both.wait()
        super().write(run, task, media)


async def test_tasks_and_rows_are_sent_and_filled_together(url: str) -> None:
    store = PictureStore(Meeting(url), inline_bytes=10)
    ids = np.zeros(3, np.int32)
    tasks = [
        Task(run="run", task_id=t, prompt_ids=ids, media=(m,))
        for t, m in zip("st", (A, B), strict=True)
    ]
    sent = await store.admitted(tasks)
    assert [task.media[0].stored_bytes for task in sent] == [100, 60]
    rows = [{MEDIA: codec.pack_media(task.media)} for task in sent]
    filled = await store.filled([Uid("run", name, 0) for name in "st"], rows)
    assert [codec.unpack_media(row[MEDIA]) for row in filled] == [(A,), (B,)]
    store.close()


async def test_who_waits_for_a_thread_does_not_wait_for_the_store(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshrl.contract.picture_store.THREADS", 1)
    folders = Counting(url)
    many = [Media.of(bytes([number]) * 100) for number in range(6)]
    sent = await store_of(folders).put("run", "t", many)
    folders.hangs = True  # for half a second each
    store = store_of(folders, give_up_s=2.0)
    assert await store.get("run", "t", sent) == tuple(many)
    store.close()


async def test_a_picture_is_written_again_before_a_sweep_would_take_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = Counting(url)
    store = store_of(folders)
    await store.put("run", "t", (A, B))
    now = time.monotonic()
    monkeypatch.setattr("meshrl.contract.picture_store.time.monotonic", lambda: now + REFRESH_S)
    await store.put("run", "t", (A, B))
    assert folders.writes == 4
    assert -5 < folders.age_s("run", folder_of("t")) < 60
    store.close()


@pytest.mark.parametrize("name", ["..", ".", "a/b", "../../etc", "@x", "ü" * 90, "%2e", "a b"])
def test_no_name_leads_out_of_its_folder(name: str) -> None:
    folder = folder_of(name)
    assert "/" not in folder and folder[0] != "." and len(folder.encode()) <= LONGEST_FOLDER
    assert name_of(folder, ["another", name]) == name
    assert len({folder_of(each) for each in (name, name + "x", "t")}) == 3


def test_a_url_that_cannot_be_opened_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"data\.media_store: nothing://x"):
        PictureFolders("nothing://x")


async def test_a_task_goes_by_names_and_its_rows_come_with_data(url: str) -> None:
    store = store_of(PictureFolders(url))
    task = Task(run="run", task_id="t", prompt_ids=np.zeros(3, np.int32), media=(A, B))
    (sent,) = await store.admitted([task])
    unpacked = codec.unpack_task(codec.encode_task(sent).SerializeToString())
    assert unpacked.media == sent.media != task.media
    assert codec.stored_in_task(codec.pack_task(sent).data) == {A.sha256: 100, B.sha256: 60}

    own = await store.put("run", "t", own_media((A, Media.of(b"c" * 130)), task.media))
    assert [bool(each.stored_bytes) for each in own] == [False, True]  # A is the task's
    floats = np.zeros(3, np.float32)
    columns = {
        "tokens": np.zeros(3, np.int32),
        "loss_mask": np.zeros(3, np.uint8),
        "rollout_logprobs": floats,
        "spans": np.zeros((0, 4), np.int64),
        MEDIA: codec.pack_media(sent.media),
        ROW_MEDIA: codec.pack_media(own),
    }
    with pytest.raises(CorruptError, match=r"data\.media_store names none here"):
        trajectory(UID, columns)
    (filled,) = await store.filled([UID], [columns])
    row = trajectory(UID, filled)
    assert row.media == (A, B)
    assert media_of_row(UID, row.row_media, row.media) == (A, Media.of(b"c" * 130))
    with pytest.raises(CorruptError, match=r"data\.media_store names none here"):
        media_of_row(UID, None, sent.media)
    store.close()


@pytest.mark.parametrize(
    "wrong",
    [
        Media(sha256="../../x", data=b"", stored_bytes=3),
        Media(sha256=A.sha256.upper(), data=b"", stored_bytes=3),
        Media(sha256=A.sha256, data=A.data, stored_bytes=100),
    ],
)
def test_a_name_from_a_message_is_the_name_of_a_picture(wrong: Media) -> None:
    with pytest.raises(CorruptError, match="is no name of a stored one"):
        codec.unpack_media(codec.pack_media([wrong]), names=True, stored=True)


def test_a_kill_while_a_picture_is_written_leaves_no_half_of_it(tmp_path: Path) -> None:
    folders = PictureFolders(str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)]) as writer:
        while not folders.pictures("run", "t"):
            time.sleep(0.05)
        writer.kill()
    for name, size in folders.pictures("run", "t").items():
        assert folders.read("run", "t", Media(sha256=name, data=b"", stored_bytes=size))
    folders.remove("run", "t")  # and what is left of drafts
    assert list((tmp_path / "run").iterdir()) == []
