"""Pictures that are too large for the queue's messages, as objects of a store that fsspec opens.

    <data.media_store>/<run>/<task>/<sha256>

    feeder, evaluator ──put──▶ ┌───────┐ ──get──▶ rollout worker, reference, trainer, row log
    rollout worker ────put───▶ └───────┘ ◀─remove── queue, when the task has left

An object is written before its name goes to the queue, and its name is its content: writing twice is writing once,
and a kill in between leaves objects that the queue's sweep finds. Names from a message never lead out of the folder
of their task, and what is read is what the name says, in bytes and sha256, or CorruptError.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import ParamSpec, TypeVar
from urllib.parse import quote, unquote

from meshrl.contract import codec
from meshrl.contract.errors import CapacityError, CorruptError, UnavailableError, UserError
from meshrl.contract.object_store import ObjectStore
from meshrl.contract.types import MEDIA, ROW_MEDIA, Columns, Media, Task, Uid
from meshrl.contract.types.rows import MOST_MEDIA_BYTES, MOST_STORED

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)

KEY = "data.media_store"
THREADS = 8
GIVE_UP_S = 60.0
"""How long a store that fails, or does not answer, is asked again."""
REFRESH_S = 3600.0
"""An object that was written so long ago is written again before its name is sent once more: a sweep takes objects
of tasks that nobody has admitted for a day."""
CACHED_BYTES = 256 << 20
MOST_REMEMBERED = 1 << 16
NAME = re.compile(r"[0-9a-f]{64}")
_PATH = re.compile(r"[^/.][^/]*/[^/.][^/]*/[0-9a-f]{64}")
LONGEST_FOLDER = 200
"""Characters of a folder's name; file systems have names of 255 bytes at most."""


def folder_of(name: str) -> str:
    """The folder of a run or a task. No two have the same, and none leads to another one."""
    quoted = quote(name, safe="")
    if not quoted or len(quoted) > LONGEST_FOLDER:
        return "@" + hashlib.sha256(name.encode()).hexdigest()
    return "%2E" + quoted[1:] if quoted[0] == "." else quoted


def name_of(folder: str, among: Iterable[str]) -> str | None:
    """The inverse of `folder_of`: of a long name only where it is `among` others."""
    if folder.startswith("@"):
        long = (name for name in among if 3 * len(name.encode()) > LONGEST_FOLDER)
        return next((name for name in long if folder_of(name) == folder), None)
    name = unquote(folder)
    return name if folder_of(name) == folder else None


class PictureFolders:
    """The store itself. Everything blocks."""

    def __init__(self, url: str) -> None:
        """Opens nothing yet. Raises ConfigError for a URL that cannot be opened here."""
        self._store = ObjectStore(url, KEY)
        self.url = self._store.url

    def write(self, run: str, task: str, media: Media) -> None:
        """Write one picture. Raises CapacityError when the store refuses."""
        self._store.write(path_of(run, task, media.sha256), media.data)

    def read(self, run: str, task: str, media: Media) -> Media:
        """One picture, with its data.

        Raises:
            CorruptError: it is not there, or is another one than its name says.
            UnavailableError: the store fails.
        """
        path, size = path_of(run, task, media.sha256), media.stored_bytes
        if size > MOST_MEDIA_BYTES:
            raise CorruptError(f"{self.url}: {path} has {size} bytes, at most {MOST_MEDIA_BYTES}")
        found = Media.of(self._store.read(path, size + 1))
        if found.sha256 != media.sha256:
            raise CorruptError(f"{self.url}: {path} has other data than its name says")
        return found

    def pictures(self, run: str, task: str) -> Mapping[str, int]:
        """The bytes of each picture of a task, by name. Raises UnavailableError."""
        found = self._store.entries(f"{folder_of(run)}/{folder_of(task)}")
        return {name: size for name, size in found.items() if NAME.fullmatch(name)}

    def tasks(self, run: str) -> Sequence[str]:
        """The folders of a run's tasks. Raises UnavailableError."""
        return list(self._store.entries(folder_of(run)))

    def remove(self, run: str, folder: str) -> None:
        """Delete all pictures of a task, by its folder. Raises UnavailableError."""
        self._store.remove(f"{folder_of(run)}/{folder}")

    def put_back(self, path: str, data: bytes) -> None:
        """Write a picture of a backup.

        Raises:
            CorruptError: `path` is none of a picture. CapacityError: the store refuses.
        """
        if not _PATH.fullmatch(path):
            raise CorruptError(f"{path[:200]!r} is no path of a picture")
        self._store.write(path, data)

    def age_s(self, run: str, folder: str) -> float:
        """Seconds since a picture of a task was last written. Raises UnavailableError."""
        at = f"{folder_of(run)}/{folder}"
        written = [self._store.changed(f"{at}/{name}") for name in self._store.entries(at)]
        return time.time() - max(written, default=0.0)


class PictureStore:
    """The store for the services of a mesh. It belongs to one event loop; call `close` at the end."""

    def __init__(
        self,
        folders: PictureFolders,
        *,
        inline_bytes: int,
        give_up_s: float = GIVE_UP_S,
        cached_bytes: int = CACHED_BYTES,
    ) -> None:
        """Pictures of one prompt or one row with more than `inline_bytes` go through `folders`."""
        self._folders = folders
        self._inline_bytes = inline_bytes
        self._give_up_s = give_up_s
        self._cached_bytes = cached_bytes
        self._cached: OrderedDict[str, Media] = OrderedDict()
        self._size = 0
        self._written: OrderedDict[tuple[str, str, str], float] = OrderedDict()
        """When this process wrote which."""
        self._reading: dict[tuple[str, str, str], asyncio.Task[Media]] = {}
        """The rows of a group ask for the same pictures at once."""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="pictures")
        self._free = asyncio.Semaphore(THREADS)

    def close(self) -> None:
        """Wait for nothing that is under way; idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def put(self, run: str, task: str, media: Sequence[Media]) -> tuple[Media, ...]:
        """`media` as they are sent to the queue: if they are too large, in the store and without data.

        Raises:
            UserError: they are too large for a store, too.
            UnavailableError: the store has failed for so long.
        """
        sizes = {each.sha256: len(each.data) for each in media if each.data}
        if (size := sum(sizes.values())) <= self._inline_bytes:
            return tuple(media)
        if size > MOST_STORED:
            raise UserError(f"task {task}: {size} bytes of pictures, at most {MOST_STORED}")
        named = {each.sha256: each for each in media if each.data}
        await asyncio.gather(*(self._put(run, task, each) for each in named.values()))
        return tuple(
            replace(each, data=b"", stored_bytes=len(each.data)) if each.data else each
            for each in media
        )

    async def get(self, run: str, task: str, media: Sequence[Media]) -> tuple[Media, ...]:
        """`media` with their data, also of those that are in the store.

        Raises:
            CorruptError: one is not there, or is another one than its name says; or they are too large.
            UnavailableError: the store has failed for so long.
        """
        named = {each.sha256: each for each in media if each.stored_bytes}
        if (size := sum(each.stored_bytes for each in named.values())) > MOST_STORED:
            raise CorruptError(f"task {task}: {size} bytes of pictures, at most {MOST_STORED}")
        found = await asyncio.gather(*(self._get(run, task, each) for each in named.values()))
        by_name = dict(zip(named, found, strict=True))
        return tuple(by_name.get(each.sha256, each) if not each.data else each for each in media)

    async def admitted(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """Tasks as they are admitted to the queue. Raises as `put` does."""
        puts = (self.put(task.run, task.task_id, task.media) for task in tasks)
        return [
            task if media == task.media else replace(task, media=media)
            for task, media in zip(tasks, await asyncio.gather(*puts), strict=True)
        ]

    async def filled(self, uids: Sequence[Uid], rows: Sequence[Columns]) -> Sequence[Columns]:
        """Rows as the queue gave them, with the data of all their pictures. Raises as `get` does."""
        return await asyncio.gather(
            *(self._filled(uid, row) for uid, row in zip(uids, rows, strict=True))
        )

    async def _filled(self, uid: Uid, columns: Columns) -> Columns:
        for name in (MEDIA, ROW_MEDIA):
            if name in columns and codec.stored_in_column(columns[name]):
                media = codec.unpack_media(columns[name], names=True, stored=True)
                found = await self.get(uid.run, uid.task, media)
                columns = {**columns, name: codec.pack_media(found)}
        return columns

    async def _put(self, run: str, task: str, media: Media) -> None:
        key, now = (run, task, media.sha256), time.monotonic()
        if now - self._written.get(key, -REFRESH_S) < REFRESH_S:
            return
        await self._insist(self._folders.write, run, task, media)
        self._written[key] = now
        self._written.move_to_end(key)
        while len(self._written) > MOST_REMEMBERED:
            self._written.popitem(last=False)

    async def _get(self, run: str, task: str, media: Media) -> Media:
        if (known := self._cached.get(media.sha256)) is not None:
            self._cached.move_to_end(media.sha256)
            return known
        key = (run, task, media.sha256)
        if (reading := self._reading.get(key)) is None:
            reading = asyncio.create_task(self._read(run, task, media), name="picture-read")
            self._reading[key] = reading
            reading.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(reading)  # another row may wait for it, too

    def _forget(self, key: tuple[str, str, str], done: asyncio.Task[Media]) -> None:
        del self._reading[key]
        if not done.cancelled():
            done.exception()  # who waited has seen it

    async def _read(self, run: str, task: str, media: Media) -> Media:
        found = await self._insist(self._folders.read, run, task, media)
        if found.sha256 not in self._cached:
            self._cached[found.sha256] = found
            self._size += len(found.data)
        while self._size > self._cached_bytes:
            self._size -= len(self._cached.popitem(last=False)[1].data)
        return found

    async def _insist(self, ask: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What `ask` returns in a thread, asked again while the store fails."""
        loop, pause = asyncio.get_running_loop(), 0.1
        async with self._free:  # who waits for a thread has not asked the store yet
            give_up_at = loop.time() + self._give_up_s
            while True:
                try:
                    async with asyncio.timeout_at(give_up_at):
                        return await loop.run_in_executor(
                            self._threads, lambda: ask(*args, **kwargs)
                        )
                except TimeoutError:
                    raise UnavailableError(
                        f"{self._folders.url} has not answered for {self._give_up_s:g} s"
                    ) from None
                except (UnavailableError, CapacityError) as error:
                    if loop.time() + pause > give_up_at:
                        raise UnavailableError(error.message) from error
                    log.warning("pictures: %s; asking again", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, 5.0)


def path_of(run: str, task: str, name: str) -> str:
    """Where the picture `name` of a task is in the store."""
    return f"{folder_of(run)}/{folder_of(task)}/{name}"
