"""One moment of the disk store, read for an export while the store goes on.

    file ──copy──▶ export-…/data.mdb (no name any more) ──pieces──▶ reader     the disk has room
    file ──one read transaction──────────────────────────pieces──▶ reader     it has none

A reader of the copy may be as slow as it likes: it holds nothing up, but places of long values that are freed
meanwhile are used again only afterwards, so frames.dat grows by what a slow export outlasts. While the file itself
is read, its map cannot grow and freed pages are not used again. A reader that takes nothing for `stall_s` is given
up either way: it holds space.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

import lmdb

from meshrl.contract.errors import WaitTimeoutError
from meshrl.transferqueue.store import Operation, Table
from meshrl.transferqueue.stores._frame_file import FrameFile

STALL_S: Final = 120.0
"""A reader that asks for no piece for so long is given up."""
PIECE_BYTES: Final = 8 << 20
"""The size of one piece."""
FOLDER: Final = "export-"
"""How the names of the copies' folders begin: one that a killed process left is removed when the store opens."""

T = TypeVar("T")


class Snapshot:
    """Belongs to one event loop; reads on a thread of its own."""

    def __init__(
        self,
        skip: bytes,
        frames: FrameFile,
        release: Callable[[], None],
        *,
        stall_s: float = STALL_S,
    ) -> None:
        """Of all but META's key `skip`. `release` is called once: when LMDB's own file is not read any more.

        Long values are read in `frames` to the end: their places are not used again before.
        """
        frames.begin_reading()
        self._frames: FrameFile | None = frames
        self._stall_s = stall_s
        self._skip = skip
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="queue-export")
        self._release: Callable[[], None] | None = release
        self._copy: lmdb.Environment | None = None
        self._transaction: lmdb.Transaction | None = None
        self._pieces: Iterator[list[Operation]] = iter(())
        self._stalled = False

    async def begin(
        self, environment: lmdb.Environment, tables: Mapping[Table, Any], folder: Path | None
    ) -> None:
        """Start to read what `environment` holds now, from a copy in `folder` where one is given."""
        await self._run(lambda: self._begin(environment, tables, folder))
        if folder is not None:
            self._free()

    async def next(self) -> list[Operation] | None:
        """The next records, META before PAYLOAD; None at the end.

        Raises:
            WaitTimeoutError: the reader was given up.
        """
        if self._stalled:
            raise WaitTimeoutError(
                f"the export was given up: nothing was read for {self._stall_s:g} s"
            )
        return await self._run(lambda: next(self._pieces, None))

    @contextmanager
    def handed_over(self) -> Iterator[None]:
        """While the reader has a piece: after `stall_s` the snapshot is closed."""
        timer = asyncio.get_running_loop().call_later(self._stall_s, self._give_up)
        try:
            yield
        finally:
            timer.cancel()

    async def end(self) -> None:
        """Close what is open; idempotent."""
        await self._run(self._close)
        self._thread.shutdown(wait=False)
        self._free()

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _begin(
        self, environment: lmdb.Environment, tables: Mapping[Table, Any], folder: Path | None
    ) -> None:
        if folder is not None:
            with TemporaryDirectory(dir=folder, prefix=FOLDER) as place:
                environment.copy(place)
                size = (Path(place) / "data.mdb").stat().st_size
                self._copy = environment = lmdb.open(
                    place, map_size=size, max_dbs=len(Table), readonly=True, lock=False
                )
            tables = {table: environment.open_db(table.encode(), create=False) for table in Table}
        self._transaction = environment.begin()
        assert self._frames is not None
        self._pieces = _pieces(self._transaction, tables, self._skip, self._frames)

    def _give_up(self) -> None:
        self._stalled = True
        closing = asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        closing.add_done_callback(lambda _: self._free())

    def _close(self) -> None:
        self._pieces = iter(())
        if self._transaction is not None:
            self._transaction.abort()
            self._transaction = None
        if self._copy is not None:
            self._copy.close()
            self._copy = None
        if self._frames is not None:
            self._frames.end_reading()
            self._frames = None

    def _free(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()


def _pieces(
    transaction: lmdb.Transaction, tables: Mapping[Table, Any], skip: bytes, frames: FrameFile
) -> Iterator[list[Operation]]:
    for table in Table:
        piece: list[Operation] = []
        size = 0
        for key, value in transaction.cursor(db=tables[table]):
            if table is Table.META and key == skip:
                continue
            read = frames.read(bytes(value)) if table is Table.PAYLOAD else bytes(value)
            if read is None:  # lost: whoever wants it will miss it in the copy, too
                continue
            piece.append(Operation(table, bytes(key), read))
            size += len(key) + len(read)
            if size >= PIECE_BYTES:
                yield piece
                piece, size = [], 0
        if piece:
            yield piece
