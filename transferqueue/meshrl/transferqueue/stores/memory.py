"""The store for tests and throw-away runs: two dicts. Nothing survives the process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.store import Operation, Table


class MemoryStore:
    """Keeps its bytes for as long as the object lives, so that a queue can be closed and opened on it again."""

    def __init__(self) -> None:
        self._tables: dict[Table, dict[bytes, bytes]] = {table: {} for table in Table}

    async def load(self) -> Sequence[tuple[bytes, bytes]]:
        """Every META record, in key order."""
        return sorted(self._tables[Table.META].items())

    async def apply(self, operations: Sequence[Operation]) -> None:
        """Cannot fail: dict assignment either happens or the process is gone."""
        for table, key, value in operations:
            if value is None:
                self._tables[table].pop(key, None)
            else:
                self._tables[table][key] = value

    async def read(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """The PAYLOAD values of `keys`."""
        payload = self._tables[Table.PAYLOAD]
        return [payload.get(key) for key in keys]

    def check_room(self, nbytes: int) -> None:
        """Memory is bounded by admission (`resident_bytes`), not here."""

    async def close(self) -> None:
        """Keep the bytes."""


def build(config: QueueConfig, path: Path) -> MemoryStore:
    """A fresh one; neither argument matters."""
    del config, path
    return MemoryStore()
