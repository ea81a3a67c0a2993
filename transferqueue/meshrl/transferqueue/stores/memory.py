"""The store in RAM: two dicts, and a file for payload that does not fit. Nothing survives the process."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final

from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.store import Operation, Table
from meshrl.transferqueue.stores.disk import DiskStore

EXPORT_RECORDS: Final = 4096


class MemoryStore:
    """Holds its bytes for as long as the object lives, so that a queue can be closed and opened on it again.

    With `memory_bytes`, the oldest payload goes to an LMDB file in `folder` whenever there is more than that. The
    file is temporary: nobody else reads it, and it is deleted when the store is closed.
    """

    def __init__(
        self, *, memory_bytes: int = 0, folder: Path = Path("spill"), reserve_bytes: int = 0
    ) -> None:
        self._tables: dict[Table, dict[bytes, bytes]] = {table: {} for table in Table}
        self._nbytes = 0
        """Bytes of PAYLOAD in RAM."""
        self._limit = memory_bytes
        self._folder = folder
        self._reserve_bytes = reserve_bytes
        self._file: DiskStore | None = None
        self._spilled: set[bytes] = set()
        """Keys whose value is in the file."""
        self._garbage: set[bytes] = set()
        """Keys in the file that are no longer needed: they are deleted with the next write."""
        self._changing = asyncio.Lock()

    async def load(self) -> Sequence[tuple[bytes, bytes]]:
        """Every META record, in key order."""
        return sorted(self._tables[Table.META].items())

    async def apply(self, operations: Sequence[Operation]) -> None:
        """The file comes first, because only it can fail. Raises CapacityError, InfraError."""
        async with self._changing:
            if self._limit:
                await self._spill(sum(len(op.value or b"") for op in operations))
            self._change(operations)

    async def read(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """The PAYLOAD values of `keys`."""
        payload = self._tables[Table.PAYLOAD]
        values_by_place = [payload.get(key) for key in keys]
        spilled = [at for at, key in enumerate(keys) if key in self._spilled]
        if spilled and self._file is not None:
            values = await self._file.read([keys[at] for at in spilled])
            for at, value in zip(spilled, values, strict=True):
                values_by_place[at] = value
        return values_by_place

    def check_room(self, nbytes: int) -> None:
        """RAM is bounded by admission (`resident_bytes`), the file by its disk. Raises CapacityError."""
        if self._file is not None:
            self._file.check_room(nbytes)

    def size_bytes(self) -> int:
        """Payload in RAM, and the file."""
        return self._nbytes + (self._file.size_bytes() if self._file is not None else 0)

    async def export(self) -> AsyncGenerator[Sequence[Operation], None]:
        """Every record as of the first piece."""
        async with self._changing:
            records = {table: list(found.items()) for table, found in self._tables.items()}
            spilled = frozenset(self._spilled)
            file = _no_pieces() if self._file is None else self._file.export()
            piece = await anext(file, None)
        async with aclosing(file):
            for wanted in _pieces(Table.META, records[Table.META]):
                yield wanted
            # The file's before what is in RAM: it gives up a reader that takes nothing for long.
            while piece is not None:
                if wanted := [operation for operation in piece if operation.key in spilled]:
                    yield wanted
                piece = await anext(file, None)
        for wanted in _pieces(Table.PAYLOAD, records[Table.PAYLOAD]):
            yield wanted

    async def close(self) -> None:
        """Delete the file; the bytes in RAM stay."""
        if self._file is not None:
            await self._file.close()
            self._file = None
            self._spilled.clear()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _change(self, operations: Sequence[Operation]) -> None:
        payload = self._tables[Table.PAYLOAD]
        for table, key, value in operations:
            if table is Table.PAYLOAD:
                self._nbytes += len(value or b"") - len(payload.get(key, b""))
                if key in self._spilled:
                    self._spilled.remove(key)
                    self._garbage.add(key)
            if value is None:
                self._tables[table].pop(key, None)
            else:
                self._tables[table][key] = value

    async def _spill(self, nbytes: int) -> None:
        """Move the oldest payload to the file until `nbytes` more fit, and an eighth of the bound beyond that."""
        if self._nbytes + nbytes <= self._limit:
            return
        excess = self._nbytes + nbytes - self._limit * 7 // 8
        payload = self._tables[Table.PAYLOAD]
        cold: list[Operation] = []
        for key, value in payload.items():
            if excess <= 0:
                break
            cold.append(Operation(Table.PAYLOAD, key, value))
            excess -= len(value)
        garbage = self._garbage.difference(op.key for op in cold)
        if self._file is None:
            self._file = await self._new_file()
        await self._file.apply([*cold, *(Operation(Table.PAYLOAD, key, None) for key in garbage)])
        self._garbage.clear()
        for operation in cold:
            self._nbytes -= len(payload.pop(operation.key))
            self._spilled.add(operation.key)

    async def _new_file(self) -> DiskStore:
        shutil.rmtree(self._folder, ignore_errors=True)
        file = DiskStore(self._folder, durability="none", reserve_bytes=self._reserve_bytes)
        await file.load()
        return file


def _pieces(table: Table, records: Sequence[tuple[bytes, bytes]]) -> Iterator[list[Operation]]:
    for at in range(0, len(records), EXPORT_RECORDS):
        yield [Operation(table, *record) for record in records[at : at + EXPORT_RECORDS]]


async def _no_pieces() -> AsyncGenerator[Sequence[Operation], None]:
    nothing: Sequence[Sequence[Operation]] = ()
    for piece in nothing:
        yield piece


def build(config: QueueConfig, path: Path) -> MemoryStore:
    """A new, empty store; payload beyond `memory_bytes` goes to a folder in `path`."""
    return MemoryStore(
        memory_bytes=config.memory_bytes, folder=path / "spill", reserve_bytes=config.reserve_bytes
    )
