"""Changes the file of a closed disk store, page by page."""

from __future__ import annotations

from pathlib import Path

from meshrl.contract.frames import with_checksum
from meshrl.transferqueue.store import Operation, Table
from meshrl.transferqueue.stores.disk import DiskStore

PAGE = 4096
LEAF, OVERFLOW = 2, 4
"""Page flags of LMDB, in bytes 10 and 11 of a page."""


def pages(data: bytes, kind: int, holding: bytes = b"") -> list[int]:
    """Offsets of the pages of a kind that contain `holding`."""
    return [
        at
        for at in range(2 * PAGE, len(data), PAGE)
        if data[at + 10] == kind and holding in data[at : at + PAGE]
    ]


async def make_store_that_kills_its_reader(folder: Path) -> None:
    """A page of its records is zeroed; LMDB calls abort() when it comes to it."""
    store = DiskStore(folder)
    await store.load()
    records = [(b"record %03d" % n, with_checksum(b"%03d" % n * 99)) for n in range(60)]
    await store.apply([Operation(Table.META, *record) for record in records])
    await store.close()
    file = folder / "data.mdb"
    data = bytearray(file.read_bytes())
    for at in pages(data, LEAF, b"record 059"):
        data[at : at + PAGE] = bytes(PAGE)
    file.write_bytes(data)
