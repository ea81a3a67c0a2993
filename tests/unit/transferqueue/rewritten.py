"""Changes records of a closed disk store by a commit: the file is sound, but the ledger is wrong."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

from meshrl.transferqueue.store import Operation, Table
from meshrl.transferqueue.stores.disk import DiskStore


async def rewrite(folder: Path, table: str, prefix: bytes, value: bytes | None) -> None:
    """Put `value` under the first key that begins with `prefix`; None deletes all of them."""
    store = DiskStore(folder)
    await store.load()
    async with aclosing(store.export()) as pieces:
        records = [operation async for piece in pieces for operation in piece]
    keys = [op.key for op in records if op.table == table and op.key.startswith(prefix)]
    assert keys
    if value is not None:
        del keys[1:]
    await store.apply([Operation(Table(table), key, value) for key in keys])
    await store.close()
