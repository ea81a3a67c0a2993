"""The store in RAM: two dicts. Nothing survives the process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Final

from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.store import Operation, Table

EXPORT_RECORDS: Final = 4096


class MemoryStore:
    """Holds its bytes for as long as the object lives, so that a queue can be closed and opened on it again."""

    name = "queue store in memory"

    def __init__(self) -> None:
        self._tables: dict[Table, dict[bytes, bytes]] = {table: {} for table in Table}
        self._nbytes = 0
        """Bytes of PAYLOAD."""

    async def load(self) -> Sequence[tuple[bytes, bytes]]:
        """Every META record, in key order."""
        return sorted(self._tables[Table.META].items())

    async def apply(self, operations: Sequence[Operation]) -> None:
        """Change the dicts; nothing can fail."""
        payload = self._tables[Table.PAYLOAD]
        for table, key, value in operations:
            if table is Table.PAYLOAD:
                self._nbytes += len(value or b"") - len(payload.get(key, b""))
            if value is None:
                self._tables[table].pop(key, None)
            else:
                self._tables[table][key] = value

    async def read(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """The PAYLOAD values of `keys`."""
        payload = self._tables[Table.PAYLOAD]
        return [payload.get(key) for key in keys]

    def check_room(self, nbytes: int) -> None:
        """There is always room: RAM is bounded by admission (`resident_bytes`)."""

    def size_bytes(self) -> int:
        """Payload in RAM."""
        return self._nbytes

    async def export(self) -> AsyncGenerator[Sequence[Operation], None]:
        """Every record as of the first piece."""
        records = {table: list(found.items()) for table, found in self._tables.items()}
        for table, found in records.items():
            for piece in _pieces(table, found):
                yield piece

    async def close(self) -> None:
        """Nothing: the bytes stay."""


def _pieces(table: Table, records: Sequence[tuple[bytes, bytes]]) -> Iterator[list[Operation]]:
    for at in range(0, len(records), EXPORT_RECORDS):
        yield [Operation(table, *record) for record in records[at : at + EXPORT_RECORDS]]


def build(config: QueueConfig, path: Path) -> MemoryStore:
    """A new, empty store."""
    return MemoryStore()
