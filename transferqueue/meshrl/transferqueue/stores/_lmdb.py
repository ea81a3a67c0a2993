"""Parts of the disk store: one moment of it for an export, and the mark of commits that no fsync followed.

    data.mdb ──copy──▶ export-…/data.mdb (no name any more) ──pieces──▶ reader

Once the copy is made, a slow reader holds no pages of the store, only the space of the copy.

Under durability `none` LMDB does not fsync, and a power cut may leave a torn file. The file `unsynced` is beside
the data from the opening of such a store to its orderly end, and holds this boot's id. The process that opens the
store next finds either the same boot (only a process died: the page cache is complete, nothing is lost), or another
(the machine went down): then the store is refused. meshrl 0.1 had a durability `everysec`, whose mark also holds
LMDB's meta pages of the last sync. After a power cut such a store goes back to that sync.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, TypeVar

import lmdb
import xxhash

from meshrl.common.files import sync
from meshrl.contract.errors import CorruptError
from meshrl.transferqueue.store import Operation, Table

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 8 << 20
"""The size of one piece."""
FOLDER: Final = "export-"
"""How the names of the copies' folders begin: one that a killed process left is removed when the store opens."""
MARK: Final = "unsynced"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_ID_BYTES: Final = 36

T = TypeVar("T")


class Snapshot:
    """Belongs to one event loop; reads on a thread of its own."""

    def __init__(self, skip: bytes) -> None:
        """All records but META's key `skip`."""
        self._skip = skip
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="queue-export")
        self._copy: lmdb.Environment | None = None
        self._pieces: Iterator[list[Operation]] = iter(())

    async def begin(self, environment: lmdb.Environment, folder: Path) -> None:
        """Copy what `environment` holds now into `folder`. Raises lmdb.Error, OSError."""
        await self._run(lambda: self._begin(environment, folder))

    async def next(self) -> list[Operation] | None:
        """The next records, META before PAYLOAD; None at the end."""
        return await self._run(lambda: next(self._pieces, None))

    async def end(self) -> None:
        """Delete the copy; idempotent."""
        await self._run(self._close)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _begin(self, environment: lmdb.Environment, folder: Path) -> None:
        with TemporaryDirectory(dir=folder, prefix=FOLDER) as place:
            environment.copy(place)
            size = (Path(place) / "data.mdb").stat().st_size
            self._copy = lmdb.open(
                place, map_size=size, max_dbs=len(Table), readonly=True, lock=False
            )
        self._pieces = self._read(self._copy)

    def _read(self, copy: lmdb.Environment) -> Iterator[list[Operation]]:
        for table in Table:
            database = copy.open_db(table.encode(), create=False)
            piece: list[Operation] = []
            size = 0
            with copy.begin(db=database) as transaction:
                for key, value in transaction.cursor():
                    if table is Table.META and key == self._skip:
                        continue
                    piece.append(Operation(table, key, value))
                    size += len(key) + len(value)
                    if size >= PIECE_BYTES:
                        yield piece
                        piece, size = [], 0
            if piece:
                yield piece

    def _close(self) -> None:
        self._pieces = iter(())
        if self._copy is not None:
            self._copy.close()
            self._copy = None


def boot_id() -> bytes:
    """Identifies this start of the machine."""
    return _BOOT_ID.read_bytes().strip().ljust(_ID_BYTES)[:_ID_BYTES]


def recover_unsynced(path: Path) -> None:
    """Call before the environment at `path` is opened: checks whether a power cut may have torn it.

    Raises:
        CorruptError: it was written with durability `none`, and the machine went down.
    """
    file = path / MARK
    if not file.exists():
        return
    content = file.read_bytes()
    boot, digest, pages = (
        content[:_ID_BYTES],
        content[_ID_BYTES : _ID_BYTES + 8],
        content[_ID_BYTES + 8 :],
    )
    if boot == boot_id():
        return
    if not pages or xxhash.xxh3_64_digest(pages) != digest:
        raise CorruptError(
            f"the queue at {path} was written with durability none when the machine went down and may be"
            " torn: restore a backup (meshrl queue restore), or choose another path"
        )
    with (path / "data.mdb").open("r+b") as data:
        data.write(pages)
        data.flush()
        os.fsync(data.fileno())
    log.warning("the queue at %s goes back to its last sync: the machine went down since", path)


def mark_unsynced(path: Path) -> None:
    """Mark that commits at `path` may be in the page cache only, from now on."""
    fresh = path / f"{MARK}.tmp"
    with fresh.open("wb") as file:
        file.write(boot_id() + xxhash.xxh3_64_digest(b""))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path / MARK)
    sync(path)


def mark_synced(path: Path, environment: lmdb.Environment) -> None:
    """Sync what may be in the page cache only, and remove the mark. Raises lmdb.Error, OSError."""
    if (path / MARK).exists():
        environment.sync(True)
        (path / MARK).unlink()
        sync(path)
