"""One moment of the disk store, read for an export while the store goes on.

    data.mdb ──copy──▶ export-…/data.mdb (no name any more) ──pieces──▶ reader

Once the copy is made, a slow reader holds no pages of the store, only the space of the copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, TypeVar

import lmdb

from meshrl.transferqueue.store import Operation, Table

PIECE_BYTES: Final = 8 << 20
"""The size of one piece."""
FOLDER: Final = "export-"
"""How the names of the copies' folders begin: one that a killed process left is removed when the store opens."""

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
