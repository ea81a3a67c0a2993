"""The durable store: one LMDB file pair per queue, owned by one process at a time, by default with fsync.

    event loop ──apply───▶ commit thread ──one write transaction──▶ data.mdb; long values in frames.dat first
               ──read────▶ read thread   ──one read transaction───▶ (memory map)
               ──export──▶ a thread more ──one read transaction───▶ (a copy: _lmdb_snapshot.py)

LMDB needs no recovery step: after a kill -9 or a power cut the file holds the last acknowledged commit, or the one
after it. Freed pages are reused; the file never shrinks. Measured against an append log, SQLite and RocksDB: full
fsync at group commits of 8 groups costs less than gRPC does, and there is no log format of our own.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import shutil
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import lmdb

from meshrl.contract import errors
from meshrl.contract.errors import CapacityError, CorruptError, InfraError, UserError
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.store import FORMAT, Operation, Table
from meshrl.transferqueue.stores import (
    _lmdb_checksums,
    _lmdb_damage,
    _lmdb_unsynced,
    _lmdb_walk,
)
from meshrl.transferqueue.stores._frame_file import FrameFile, Place, is_long
from meshrl.transferqueue.stores._lmdb_snapshot import FOLDER as EXPORT_FOLDER
from meshrl.transferqueue.stores._lmdb_snapshot import STALL_S, Snapshot

log = logging.getLogger(__name__)

STAMP = b"\x00format"
WITH_LONG_VALUES: Final = 5
"""The format of a store from its first long value on, which lies beside LMDB's file. Any other is of FORMAT."""
NUMBER_EVERY_S: Final = 0.5
"""Between two writes of the last commit's number; at each commit it would cost 2 % of CPU."""
_FULL = ("No space left", "quota exceeded", "File too large", "Input/output error")
"""LMDB reports a write cut short by a full disk as an input/output error."""
_DAMAGED = (
    *(lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError),
    *(lmdb.PageNotFoundError, lmdb.PanicError, lmdb.IncompatibleError, lmdb.BadTxnError),
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
        stall_s: float = STALL_S,
    ) -> None:
        """A reader of an export that takes nothing for `stall_s` is given up."""
        self._path = path
        self._durability = durability
        self._grow_bytes = grow_bytes
        self._reserve_bytes = reserve_bytes
        self._stall_s = stall_s
        self._environment: lmdb.Environment | None = None
        self._tables: dict[Table, Any] = {}
        """LMDB's table handles, whose type has no public name."""
        self._lock: int | None = None
        self._commits = ThreadPoolExecutor(1, thread_name_prefix="queue-commit")
        self._reads = ThreadPoolExecutor(1, thread_name_prefix="queue-read")
        self._exclusive = asyncio.Lock()
        """Held while the map grows or the environment is opened anew: no transaction may be open then."""
        self._exporting = asyncio.Lock()
        """Held while an export reads the file; taken before `_exclusive`."""
        self._closing = False
        self._frames = FrameFile(path)
        self._format = FORMAT
        self._checksum = _lmdb_checksums.StoreChecksum()
        self._number_file: _lmdb_checksums.CommitNumberFile | None = None
        self._number_timer: asyncio.TimerHandle | None = None

    async def load(self) -> Sequence[tuple[bytes, bytes]]:
        """Open the environment (again) and return META. Raises UserError, CorruptError, CapacityError."""
        self._cancel_number_timer()
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
                break
        if self._number_timer is None:
            loop = asyncio.get_running_loop()
            self._number_timer = loop.call_later(NUMBER_EVERY_S, self._write_number)

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
        """The size of the files, with space that was freed in them and will be used again."""
        return self._file_bytes() + self._frames.size_bytes()

    async def export(self) -> AsyncGenerator[Sequence[Operation], None]:
        """Every record of one commit. A reader may be slow; one that stops is given up. Commits go on."""
        snapshot = await self._snapshot()
        try:
            while True:
                piece = await snapshot.next()
                if self._closing:  # what was read last may lack what was not there any more
                    raise errors.UnavailableError("the queue is closing")
                if not piece:
                    break
                with snapshot.handed_over():
                    yield piece
        except lmdb.Error as error:
            raise InfraError(f"queue store {self._path}: cannot read: {error}") from error
        finally:
            await snapshot.end()

    async def close(self) -> None:
        """Wait for the threads, close the files, and release them to other processes."""
        self._closing = True
        self._cancel_number_timer()
        async with self._exporting, self._exclusive:
            await self._run(self._reads, lambda: None)
            await self._run(self._commits, self._shut)
        self._commits.shutdown(wait=False)
        self._reads.shutdown(wait=False)

    async def _snapshot(self) -> Snapshot:
        """One moment, from a copy of the file where the disk has room for one."""
        await self._exporting.acquire()
        snapshot = Snapshot(STAMP, self._frames, self._exporting.release, stall_s=self._stall_s)
        try:
            async with (
                self._exclusive
            ):  # while the file is read the map cannot grow: it grows ahead
                await self._run(self._reads, lambda: None)
                await self._run(self._commits, self._grow_ahead)
            room = self._free_bytes() >= self._file_bytes() + self._reserve_bytes
            await snapshot.begin(self._env, self._tables, self._path if room else None)
        except BaseException as error:
            await snapshot.end()
            if isinstance(error, lmdb.Error | OSError):
                raise self._translated(error) from error
            raise
        return snapshot

    async def _run(self, thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(thread, work)

    def _open_and_load(self) -> list[tuple[bytes, bytes]]:
        try:
            walked = self._open()
            with self._env.begin() as transaction:
                cursor = transaction.cursor(self._tables[Table.META])
                items = [(k, v) for k, v in cursor if k != STAMP]
                self._checksum = _lmdb_checksums.check(self._path, transaction, items, walked)
            with self._env.begin(buffers=True) as transaction:
                values = transaction.cursor(self._tables[Table.PAYLOAD])
                places = {bytes(key): place for key, value in values if (place := Place.of(value))}
            self._frames.open(places)
            self._number_file = _lmdb_checksums.CommitNumberFile(self._path)
            return items
        except _DAMAGED as error:
            raise CorruptError(
                f"{self._path} holds no readable queue store ({error}): restore a backup"
            ) from error
        except (lmdb.Error, OSError) as error:
            raise self._translated(error) from error

    def _open(self) -> _lmdb_walk.Walked | None:
        """The environment; returns what a walk over the file found."""
        self._shut_environment(clean=False)
        self._own()
        _lmdb_damage.refuse_emptied(self._path)
        _lmdb_unsynced.recover(self._path)
        known = _lmdb_damage.marked(self._path)
        walked = _lmdb_damage.walk(self._path)
        size = max(self._grow_bytes, self._file_bytes())
        fsync = self._durability == "always"
        self._environment = lmdb.open(
            str(self._path),
            map_size=size,
            max_dbs=len(Table),
            sync=fsync,
            readahead=False,
            mode=0o600,
        )
        _lmdb_walk.fill_up(self._path / "data.mdb", self._environment)
        for table in Table:
            self._tables[table] = self._environment.open_db(table.encode(), create=not known)
        if self._stamped(known):
            walked = (0, 0)
        _lmdb_damage.mark(self._path)
        if fsync:
            _lmdb_unsynced.clear(self._path, self._environment)
        else:
            _lmdb_unsynced.mark(self._path)
        return walked

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

    def _stamped(self, known: bool) -> bool:
        """Refuse another format; stamp a new store that is not `known`. True if it was stamped now."""
        meta = self._tables[Table.META]
        with self._env.begin(db=meta) as transaction:
            stamp = transaction.get(STAMP)
            empty = transaction.stat(meta)["entries"] == 0
        if stamp is None and empty and not known:
            with self._env.begin(write=True) as transaction:
                transaction.put(STAMP, json.dumps({"format": FORMAT}).encode(), db=meta)
                checksum = _lmdb_checksums.StoreChecksum().following(transaction.id())
                transaction.put(_lmdb_checksums.KEY, checksum.encode())
            return True
        try:
            found = json.loads(stamp or b"")["format"]
        except (TypeError, ValueError, KeyError) as error:
            raise CorruptError(
                f"{self._path}: no queue store, its stamp is {stamp!r}; if it was one, restore a backup"
            ) from error
        self._format = found
        if found not in (FORMAT, WITH_LONG_VALUES):
            raise UserError(
                f"the queue at {self._path} is stored in format {found}, this meshrl reads format"
                f" {WITH_LONG_VALUES}: finish the run with the version that wrote it, or choose another path"
            )
        return False

    def _commit(self, operations: Sequence[Operation]) -> None:
        values = [(op.key, op.value) for op in operations if op.table is Table.PAYLOAD]
        places = self._frames.write(
            {key: value for key, value in values if value is not None and is_long(value)}
        )
        try:
            if places and self._durability == "always":
                self._frames.sync()
            self._transact(operations, places)
        except BaseException:
            self._frames.take_back(places)
            raise
        self._frames.committed([key for key, _ in values], places)

    def _transact(self, operations: Sequence[Operation], places: Mapping[bytes, Place]) -> None:
        meta, payload = self._tables[Table.META], self._tables[Table.PAYLOAD]
        with self._env.begin(write=True) as transaction:
            after = self._checksum.following(transaction.id())
            if places and self._format == FORMAT:
                stamp = json.dumps({"format": WITH_LONG_VALUES}).encode()
                transaction.put(STAMP, stamp, db=meta)
            for table, key, value in operations:
                if key in places and table is Table.PAYLOAD:
                    value = places[key].encode()
                if table is Table.META:
                    if value is None:
                        after.delete(key)
                        transaction.delete(key, db=meta)
                    else:
                        after.put(key, value)
                        transaction.put(key, value, db=meta)
                elif value is None:
                    if transaction.delete(key, db=payload):
                        after.value(key, -1)
                elif transaction.put(key, value, db=payload, overwrite=False):
                    after.value(key, 1)
                else:
                    transaction.put(key, value, db=payload)
            transaction.put(_lmdb_checksums.KEY, after.encode())
        self._checksum = after.committed()
        if places:
            self._format = WITH_LONG_VALUES

    def _get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self._frames.begin_reading()
        try:
            with self._env.begin(db=self._tables[Table.PAYLOAD]) as transaction:
                return [self._frames.read(transaction.get(key)) for key in keys]
        finally:
            self._frames.end_reading()

    def _write_number(self) -> None:
        self._number_timer = None  # it is cancelled before the file is closed
        if self._number_file is not None:
            self._number_file.write(self._checksum.number)

    def _cancel_number_timer(self) -> None:
        if self._number_timer is not None:
            self._number_timer.cancel()
            self._number_timer = None

    def _grow(self) -> None:
        size = 2 * self._env.info()["map_size"]
        log.info("queue store %s: map grows to %d bytes", self._path, size)
        self._env.set_mapsize(size)

    def _grow_ahead(self) -> None:
        """Room for as much again as the file holds."""
        if self._env.info()["map_size"] < 2 * self._file_bytes():
            self._grow()

    def _shut_environment(self, *, clean: bool) -> None:
        if self._number_file is not None:
            if clean:
                self._number_file.write(self._checksum.number)
            self._number_file.close()
            self._number_file = None
        if self._environment is None:
            return
        try:
            if clean:
                _lmdb_unsynced.clear(self._path, self._environment)
        except (lmdb.Error, OSError) as error:
            log.error("queue store %s: the last sync failed: %s", self._path, error)
        self._environment.close()
        self._environment = None

    def _shut(self) -> None:
        self._shut_environment(clean=True)
        self._frames.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def _env(self) -> lmdb.Environment:
        if self._environment is None:
            raise InfraError(f"queue store {self._path} is closed")
        return self._environment

    def _file_bytes(self) -> int:
        data = self._path / "data.mdb"
        return data.stat().st_size if data.exists() else 0

    def _free_bytes(self) -> int:
        status = os.statvfs(self._path)
        return status.f_bavail * status.f_frsize

    def _translated(self, error: lmdb.Error | OSError) -> CapacityError | CorruptError | InfraError:
        text = str(error)
        if isinstance(error, _DAMAGED):
            return CorruptError(
                f"queue store {self._path}: the file is damaged ({text}): restore a backup"
            )
        if isinstance(error, lmdb.DiskError) or any(sign in text for sign in _FULL):
            free = self._free_bytes()
            return CapacityError(
                f"queue store {self._path}: the disk took no more ({text}; {free} bytes free)",
                free=free,
            )
        return InfraError(f"queue store {self._path}: {text}")


def build(config: QueueConfig, path: Path) -> DiskStore:
    """The disk store at `path`."""
    return DiskStore(
        path,
        durability=config.durability,
        reserve_bytes=config.reserve_bytes,
    )
