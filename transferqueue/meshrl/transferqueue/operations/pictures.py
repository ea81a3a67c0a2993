"""The objects of contract/picture_store.py as the queue sees them: they leave with their task, and are in its backup.

    commit by which a task has left ──▶ pending ──▶ thread ──▶ its folder is removed
    folders of a run, at the start and every SWEEP_S ──▶ those of tasks that have left ──▶ pending

The sweep finds what a kill has left, and what was written for a task after it had left. A folder of a task that is
not known may be that of a feeder that waits for room. It is removed once nothing was written there for UNKNOWN_S,
and only by a queue of a single process: others cannot tell whose task it is.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import ParamSpec, TypeVar

from meshrl.contract.errors import ConfigError, CorruptError, UnavailableError
from meshrl.contract.frames import strip_checksum, with_checksum
from meshrl.contract.picture_store import NAME, PictureFolders, folder_of, name_of, path_of
from meshrl.contract.types import Media
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.store import PICTURE, Operation, Table

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)

SWEEP_S = 600.0
RETRY_S = 10.0
UNKNOWN_S = 86_400.0
CLOSE_S = 10.0
"""How long a queue that closes removes what has left; the next one's sweep finds the rest."""
THREADS = 4


class PictureRemover:
    """Removes the pictures of tasks that have left a queue, beside it."""

    def __init__(self, folders: PictureFolders, *, alone: bool) -> None:
        """Nothing is removed before `start`; `alone`: the queue is a single process."""
        self.folders = folders
        self._alone = alone
        self._runs: Callable[[], Collection[Run]] = tuple
        self._pending: dict[tuple[str, str], None] = {}
        """Run and folder, in the order in which they left."""
        self._held = 0
        self._closing = asyncio.Event()
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="picture-removal")

    def start(self, runs: Callable[[], Collection[Run]]) -> None:
        """Begin with a sweep of the `runs` of a queue."""
        self._runs = runs
        self._task = asyncio.create_task(self._run(), name="queue-pictures")

    def left(self, tasks: Iterable[tuple[str, str]]) -> None:
        """Tasks, by run and id, have left for good, and this is durable."""
        self._pending.update({(run, folder_of(task)): None for run, task in tasks})
        self._work.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Remove nothing meanwhile."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            self._work.set()

    async def close(self) -> None:
        """Remove what has left, for CLOSE_S at most; idempotent."""
        self._closing.set()
        self._work.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=CLOSE_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        sweep_at, failing = clock(), False
        while True:
            self._work.clear()
            try:
                if clock() >= sweep_at and not self._held:
                    await self._sweep()
                    sweep_at = clock() + SWEEP_S
                await self._remove_pending()
                failing = False
            except Exception as error:  # a queue without pictures' removal is better than none
                if not failing:
                    unknown = not isinstance(error, UnavailableError)
                    log.warning("pictures stay in their store: %s", error, exc_info=unknown)
                failing = True
            if self._closing.is_set():
                return
            woken, wait_s = self._work, None if self._held else max(0.0, sweep_at - clock())
            if failing:  # tasks that leave must not ask a store that fails each time
                woken, wait_s = self._closing, RETRY_S
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await woken.wait()

    async def _remove_pending(self) -> None:
        """Raises UnavailableError."""
        while self._pending and not self._held:
            some = list(self._pending)[:THREADS]
            work = (self._in_thread(self.folders.remove, *each) for each in some)
            for each, error in zip(
                some, await asyncio.gather(*work, return_exceptions=True), strict=True
            ):
                if isinstance(error, BaseException):
                    raise error
                del self._pending[each]

    async def _sweep(self) -> None:
        """Raises UnavailableError."""
        for run in list(self._runs()):
            folders = await self._in_thread(self.folders.tasks, run.name)
            unknown = self._sorted(run, folders)
            for folder in unknown if self._alone else ():
                age_s = await self._in_thread(self.folders.age_s, run.name, folder)
                if age_s > UNKNOWN_S and self._sorted(run, [folder]):
                    self._pending[run.name, folder] = None

    def _sorted(self, run: Run, folders: Sequence[str]) -> list[str]:
        """The folders of tasks that are not known; those of tasks that have left are pending from now on."""
        needed, unknown = needed_tasks(run), []
        for folder in folders:
            task = name_of(folder, run.known_tasks)
            if task is None or task not in run.known_tasks:
                unknown.append(folder)
            elif task not in needed:
                self._pending[run.name, folder] = None
        return unknown

    async def _in_thread(self, ask: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        work = partial(ask, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def needed_tasks(run: Run) -> set[str]:
    """The tasks whose pictures somebody may ask for."""
    return {*run.by_task, *(uid.task for uid in run.dead_letters)}


async def with_pictures(
    pieces: AsyncGenerator[Sequence[Operation], None],
    folders: PictureFolders,
    restored: Callable[[Sequence[tuple[bytes, bytes]]], dict[str, Run]],
) -> AsyncGenerator[Sequence[Operation], None]:
    """What a store exports, and behind it the pictures of its tasks: one value each, `path NUL data`.

    A picture that is not there, or is another one than its name says, is left out; the audit names it.
    """
    meta: list[tuple[bytes, bytes]] = []
    async with aclosing(pieces):
        async for piece in pieces:
            meta += [(key, value or b"") for table, key, value in piece if table is Table.META]
            yield piece
    for run in restored(meta).values():
        present = set(await asyncio.to_thread(folders.tasks, run.name))
        for task in needed_tasks(run):
            if folder_of(task) not in present:
                continue
            sizes = await asyncio.to_thread(folders.pictures, run.name, task)
            for name, size in sizes.items():
                media = Media(sha256=name, data=b"", stored_bytes=size)
                try:
                    found = await asyncio.to_thread(folders.read, run.name, task, media)
                except CorruptError as error:
                    log.error("left out of the backup: %s", error)
                    continue
                yield [backed_up(path_of(run.name, task, name), found.data)]


def backed_up(path: str, data: bytes) -> Operation:
    """A picture as a value of a backup."""
    key = PICTURE + hashlib.sha256(path.encode()).digest()
    return Operation(Table.PAYLOAD, key, with_checksum(path.encode() + b"\0", data))


def read_back(value: bytes) -> tuple[str, bytes]:
    """Path and data of a value of `backed_up`. Raises CorruptError."""
    path, _, data = bytes(strip_checksum(value, "a picture of a backup")).partition(b"\0")
    name = path.decode(errors="replace").rpartition("/")[2]
    if not NAME.fullmatch(name) or hashlib.sha256(data).hexdigest() != name:
        raise CorruptError(f"picture {path[-64:]!r} of a backup has other data than its name says")
    return path.decode(), data


def put_back(operations: Iterable[Operation], folders: PictureFolders | None) -> None:
    """Write pictures of a backup to the store of the queue that is restored.

    Raises:
        ConfigError: there is none. CorruptError: they are damaged. CapacityError: the store refuses.
    """
    for _, _, value in operations:
        if folders is None:
            raise ConfigError(
                "the backup has pictures that the queue's messages are too small for: name in data.media_store"
                " where they go"
            )
        folders.put_back(*read_back(value or b""))
