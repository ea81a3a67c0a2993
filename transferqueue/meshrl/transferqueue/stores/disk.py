"""The durable store: one LMDB file pair per queue, owned by one process at a time, by default with fsync.

    event loop ──apply───▶ commit thread ──one write transaction──▶ data.mdb
               ──read────▶ read thread   ──one read transaction───▶ (memory map)
               ──export──▶ a thread more ──a copy, then its pieces─▶ (_lmdb.py)

LMDB needs no recovery step: after a kill -9 or a power cut the file holds the last acknowledged commit, or the one
after it. Freed pages are reused; the file never shrinks. Measured against an append log, SQLite and RocksDB: full
fsync at group commits of 8 groups costs less than gRPC does, and there is no log format of our own.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import resource
import shutil
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final, TypeVar

import lmdb

from meshrl.contract.errors import (
    BrokenDiskError,
    CapacityError,
    CorruptError,
    InfraError,
    MeshError,
    UserError,
)
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.several_processes import processes_noted, refusal
from meshrl.transferqueue.store import FORMAT, Operation, Table
from meshrl.transferqueue.stores._lmdb import FOLDER as EXPORT_FOLDER
from meshrl.transferqueue.stores._lmdb import Snapshot, mark_synced, mark_unsynced, recover_unsynced

log = logging.getLogger(__name__)

STAMP = b"\x00format"
STORE_FORMAT: Final = 6
"""FORMAT without what 0.1 kept beside the rows, a checksum of each commit and the file `commits`. A store of FORMAT
becomes one of this format at its first commit."""
FRAME_FILE: Final = "frames.dat"
FRAME_FILE_FORMAT: Final = 5
"""The format of commits before the first release of 6, with long rows in FRAME_FILE."""
FRAME_FILE_COMMIT: Final = "c6584707"
"""The newest commit that reads FRAME_FILE_FORMAT."""
MARK: Final = "kept"
"""A file beside the data that says that a queue is stored here."""
COMMITS: Final = "commits"
"""A file that is beside a store of FORMAT only."""
RESTORE: Final = "restore a backup (meshrl queue restore)"
SPARE_BYTES: Final = 1 << 20
"""The least by which the file is longer than its last page."""
OPERATION_BYTES: Final = 3 * 4096
"""Pages that one operation may take beside its value, rounded up."""
_FULL = ("No space left", "quota exceeded", "File too large")
_FAILED = "Input/output error"
"""LMDB reports so also a write that a full disk cut short."""
_PROBE_BYTES = 1 << 20
_DAMAGED = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.VersionMismatchError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.IncompatibleError,
    lmdb.BadTxnError,
    lmdb.NotFoundError,  # of a table: look-ups of keys never raise it
)

T = TypeVar("T")


class DiskStore:
    """Two LMDB databases in one environment at `path`."""

    def __init__(
        self,
        path: Path,
        *,
        durability: str = "always",
        grow_bytes: int = 256 << 20,
        reserve_bytes: int = 0,
    ) -> None:
        self._path = path
        self._data = path / "data.mdb"
        self._durability = durability
        self._grow_bytes = grow_bytes
        self._reserve_bytes = reserve_bytes
        self._environment: lmdb.Environment | None = None
        self._tables: dict[Table, Any] = {}
        """LMDB's table handles, whose type has no public name."""
        self._lock: int | None = None
        self._commits = ThreadPoolExecutor(1, thread_name_prefix="queue-commit")
        self._reads = ThreadPoolExecutor(1, thread_name_prefix="queue-read")
        self._exclusive = asyncio.Lock()
        """Held while the map grows or the environment is opened anew: no transaction may be open then."""
        self._exporting = asyncio.Lock()
        """Held while an export copies the file; taken before `_exclusive`."""
        self._format = 0
        """The stored format; 0 before the first commit."""
        self._length = 0
        """Bytes that the file has at least."""

    async def load(self) -> Sequence[tuple[bytes, bytes]]:
        """Open the environment (again) and return META. Raises UserError, CorruptError, CapacityError."""
        async with self._exporting, self._exclusive:
            await self._run(self._reads, lambda: None)
            return await self._run(self._commits, self._open_and_load)

    async def apply(self, operations: Sequence[Operation]) -> None:
        """One transaction, on disk on return under `always`. Raises CapacityError, InfraError."""
        while True:
            try:
                await self._run(self._commits, lambda: self._commit(operations))
            except lmdb.MapFullError:
                async with self._exporting, self._exclusive:
                    await self._run(self._reads, lambda: None)
                    await self._run(self._commits, self._grow)
            except (lmdb.Error, OSError) as error:
                raise self._translated(error) from error
            else:
                return

    async def read(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """Copies of the PAYLOAD values. Raises InfraError, CorruptError."""
        if not keys:
            return []
        async with self._exclusive:
            # Submitted under the lock, awaited outside it: a caller that needs the files alone drains the thread.
            reading = asyncio.get_running_loop().run_in_executor(self._reads, self._get, keys)
        try:
            return await reading
        except lmdb.Error as error:
            raise self._translated(error) from error

    @property
    def name(self) -> str:
        """Name of the store and its path, for messages."""
        return f"queue store {self._path}"

    def check_room(self, nbytes: int) -> None:
        """Compare with the free bytes of the file system. Raises CapacityError."""
        free = self._free_bytes()
        if free < nbytes + self._reserve_bytes:
            raise CapacityError(
                f"queue store {self._path}: {free} bytes free on disk, {nbytes} wanted and"
                f" {self._reserve_bytes} kept in reserve; rows get in again once there is space",
                free=free,
                wanted=nbytes,
            )

    def size_bytes(self) -> int:
        """Size of the file on disk, with space that was freed in it and will be used again."""
        return self._data.stat().st_blocks * 512 if self._data.exists() else 0

    async def export(self) -> AsyncGenerator[Sequence[Operation], None]:
        """Every record of one commit, from a copy, while commits continue.

        Raises:
            CapacityError: the disk has no room for the copy.
        """
        snapshot = await self._snapshot()
        try:
            while piece := await snapshot.next():
                yield piece
        except lmdb.Error as error:
            raise InfraError(f"queue store {self._path}: cannot read: {error}") from error
        finally:
            await snapshot.end()

    async def close(self) -> None:
        """Wait for the threads, close the files, and release them to other processes."""
        async with self._exporting, self._exclusive:
            await self._run(self._reads, lambda: None)
            await self._run(self._commits, self._shut)
        self._commits.shutdown(wait=False)
        self._reads.shutdown(wait=False)

    async def _snapshot(self) -> Snapshot:
        snapshot = Snapshot(STAMP)
        async with self._exporting:
            try:
                async with self._exclusive:  # the map cannot grow during the copy: it grows ahead
                    await self._run(self._reads, lambda: None)
                    await self._run(self._commits, self._grow_ahead)
                self._check_copy()
                await snapshot.begin(self._env, self._path)
            except BaseException as error:
                await (
                    snapshot.end()
                )  # of a caller that was cancelled the thread may still be copying
                if isinstance(error, lmdb.Error | OSError):
                    raise self._translated(error) from error
                raise
        return snapshot

    def _check_copy(self) -> None:
        needed, free = self._file_bytes(), self._free_bytes()
        if free < needed + self._reserve_bytes:
            raise CapacityError(
                f"queue store {self._path}: no room for the copy that an export reads: {free} bytes free on"
                f" disk, {needed} needed and {self._reserve_bytes} kept in reserve",
                free=free,
                wanted=needed,
            )

    async def _run(self, thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(thread, work)

    def _open_and_load(self) -> list[tuple[bytes, bytes]]:
        try:
            self._open()
            with self._env.begin(db=self._tables[Table.META]) as transaction:
                return [(key, value) for key, value in transaction.cursor() if key != STAMP]
        except _DAMAGED as error:
            raise CorruptError(
                f"{self._path} holds no readable queue store ({error}): {RESTORE}"
            ) from error
        except (lmdb.Error, OSError) as error:
            raise self._translated(error) from error

    def _open(self) -> None:
        self._shut_environment(clean=False)
        if (self._path / FRAME_FILE).exists():
            raise self._of_frame_file()
        self._own()
        known = (self._path / MARK).exists()
        if known and not self._file_bytes():  # LMDB would take it for a new one
            raise CorruptError(
                f"{self._data} is empty or gone, and a queue was stored there: put it back, or remove"
                f" {self._path} to start afresh"
            )
        recover_unsynced(self._path)
        fsync = self._durability == "always"
        self._environment = lmdb.open(
            str(self._path),
            map_size=max(self._grow_bytes, self._file_bytes()),
            max_dbs=len(Table),
            sync=fsync,
            readahead=False,
            mode=0o600,
        )
        self._check_length()
        _refuse_several(self._path, self._environment)
        for table in Table:
            self._tables[table] = self._environment.open_db(table.encode(), create=not known)
        self._check_stamp(known)
        (self._path / MARK).touch()
        if fsync:
            mark_synced(self._path, self._environment)
        else:
            mark_unsynced(self._path)

    def _check_length(self) -> None:
        """Refuse a file that ends before its last page: LMDB would map it, and reading behind the end is a SIGBUS.

        Before format 6 the last pages of a sound file may be missing, too: see `_extend`.
        """
        self._length = self._file_bytes()
        if self._length >= self._used_bytes():
            return
        if not (self._path / COMMITS).exists():
            raise CorruptError(
                f"{self._data} is cut short: it has {self._length} bytes, and its meta page says"
                f" {self._used_bytes()}: {RESTORE}"
            )
        self._extend(0)

    def _used_bytes(self) -> int:
        """Up to the end of the last page, as LMDB's newest meta page says."""
        return (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]

    def _extend(self, nbytes: int) -> None:
        """Keep the file longer than its last page will be when `nbytes` more are in it. The end takes no space.

        LMDB counts pages that it frees in the transaction that took them and does not write them, so the file of a
        sound store would be shorter than its meta page says.
        """
        wanted = (
            self._used_bytes() * 513 // 512 + nbytes + SPARE_BYTES
        )  # the list of free pages grows, too
        if self._length < wanted:
            self._length = wanted + SPARE_BYTES
            os.truncate(self._data, self._length)

    def _of_frame_file(self) -> UserError:
        return UserError(
            f"the queue at {self._path} is stored in format {FRAME_FILE_FORMAT}, with long rows in {FRAME_FILE},"
            f" which was never released: only meshrl at commit {FRAME_FILE_COMMIT} reads it; finish the run with"
            " that, or choose another path"
        )

    def _own(self) -> None:
        """Take the lock that ends with the process: a second queue on these files would not see our RAM."""
        if self._lock is not None:
            return
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._path / "owner.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise UserError(f"cannot keep a queue at {self._path}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(lock, 32, 0).decode() or "unknown"
            os.close(lock)
            raise UserError(
                f"the queue at {self._path} is already open in process {owner}"
            ) from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        self._lock = lock
        for left in self._path.glob(f"{EXPORT_FOLDER}*"):  # a killed process's
            shutil.rmtree(left, ignore_errors=True)

    def _check_stamp(self, known: bool) -> None:
        """Refuse another format; stamp a new store that is not `known`."""
        meta = self._tables[Table.META]
        with self._env.begin(db=meta) as transaction:
            stamp = transaction.get(STAMP)
            empty = transaction.stat(meta)["entries"] == 0
        self._format = 0
        if stamp is None and empty and not known:
            self._commit([])
            return
        try:
            self._format = json.loads(stamp or b"")["format"]
        except (TypeError, ValueError, KeyError) as error:
            raise CorruptError(
                f"{self._path}: no queue store, its stamp is {stamp!r}; if it was one, {RESTORE}"
            ) from error
        if self._format == FRAME_FILE_FORMAT:
            raise self._of_frame_file()
        if self._format not in (FORMAT, STORE_FORMAT):
            raise UserError(
                f"the queue at {self._path} is stored in format {self._format}, this meshrl reads format"
                f" {STORE_FORMAT}: finish the run with the version that wrote it, or choose another path"
            )

    def _commit(self, operations: Sequence[Operation]) -> None:
        size = sum(len(op.value or b"") for op in operations)
        self._extend(size + len(operations) * OPERATION_BYTES)
        stamped = self._format == STORE_FORMAT
        with self._env.begin(write=True) as transaction:
            if not stamped:
                stamp = json.dumps({"format": STORE_FORMAT}).encode()
                transaction.put(STAMP, stamp, db=self._tables[Table.META])
            for table, key, value in operations:
                if value is None:
                    transaction.delete(key, db=self._tables[table])
                else:
                    transaction.put(key, value, db=self._tables[table])
        if not stamped:
            self._format = STORE_FORMAT
            (self._path / COMMITS).unlink(missing_ok=True)

    def _get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._env.begin(db=self._tables[Table.PAYLOAD]) as transaction:
            return [transaction.get(key) for key in keys]

    def _grow(self) -> None:
        size = 2 * self._env.info()["map_size"]
        log.info("queue store %s: map grows to %d bytes", self._path, size)
        self._env.set_mapsize(size)

    def _grow_ahead(self) -> None:
        """Room for as much again as the file holds."""
        if self._env.info()["map_size"] < 2 * self._file_bytes():
            self._grow()

    def _shut_environment(self, *, clean: bool) -> None:
        if self._environment is None:
            return
        try:
            if clean:
                mark_synced(self._path, self._environment)
        except (lmdb.Error, OSError) as error:
            log.error("queue store %s: the last sync failed: %s", self._path, error)
        self._environment.close()
        self._environment = None

    def _shut(self) -> None:
        self._shut_environment(clean=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def _env(self) -> lmdb.Environment:
        if self._environment is None:
            raise InfraError(f"queue store {self._path} is closed")
        return self._environment

    def _file_bytes(self) -> int:
        return self._data.stat().st_size if self._data.exists() else 0

    def _free_bytes(self) -> int:
        status = os.statvfs(self._path)
        return status.f_bavail * status.f_frsize

    def _is_full(self) -> bool:
        """Whether the disk, a quota or the process's limit of file sizes has no room for the next growth."""
        most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if most != resource.RLIM_INFINITY and self._file_bytes() + self._grow_bytes > most:
            return True
        if self._free_bytes() < self._grow_bytes:
            return True
        try:
            with TemporaryFile(dir=self._path) as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return False

    def _translated(self, error: lmdb.Error | OSError) -> MeshError:
        text = str(error)
        if isinstance(error, _DAMAGED):
            return CorruptError(
                f"queue store {self._path}: the file is damaged ({text}): {RESTORE}"
            )
        if _FAILED in text and not self._is_full():
            return BrokenDiskError(
                f"queue store {self._path}: the disk failed to write, and has room ({text}): replace it; what was"
                f" acknowledged is on it, or in the last backup"
            )
        if isinstance(error, lmdb.DiskError) or any(sign in text for sign in (*_FULL, _FAILED)):
            free = self._free_bytes()
            return CapacityError(
                f"queue store {self._path}: the disk took no more ({text}; {free} bytes free)",
                free=free,
            )
        return InfraError(f"queue store {self._path}: {text}")


def _refuse_several(path: Path, environment: lmdb.Environment) -> None:
    """Raises UserError where the store at `path` is one of a queue of several processes. Writes nothing."""
    first, _, number = path.name.rpartition("-")
    others = (path.with_name(first), path.with_name(f"{first}-0")) if number.isdecimal() else ()
    if _processes(environment) > 1 or any(
        _processes_at(other) > max(1, int(number)) for other in others
    ):
        raise refusal(f"{path} is one of several queue processes")


def _processes_at(path: Path) -> int:
    """How many processes the queue has whose first store is at `path`; 1 where none is there or can be read."""
    with suppress(lmdb.Error):
        environment = lmdb.open(
            str(path),
            create=False,
            readonly=True,
            lock=False,
            max_dbs=len(Table),
        )
        try:
            return _processes(environment)
        finally:
            environment.close()
    return 1


def _processes(environment: lmdb.Environment) -> int:
    """How many processes a queue has, as its first store notes; 1 where it notes none."""
    try:
        table = environment.open_db(Table.META.encode(), create=False)
    except lmdb.NotFoundError:  # a new store
        return 1
    with environment.begin(db=table) as transaction:
        cursor = transaction.cursor()
        cursor.set_range(b"r")
        return processes_noted(takewhile(lambda item: item[0] < b"t", cursor))


def build(config: QueueConfig, path: Path) -> DiskStore:
    """The disk store at `path`."""
    return DiskStore(
        path,
        durability=config.durability,
        reserve_bytes=config.reserve_bytes,
    )
