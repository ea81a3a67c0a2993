"""Walks an LMDB file as its queue will, in a process of its own: LMDB answers some damaged pages with abort().

    python _lmdb_walk.py FOLDER

Ends with 0 for a file whose trees can be walked and written, and prints what the payload's keys add up to; with a
signal or an error for any other. Imports nothing of ours, so that it starts at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, TypeAlias

import lmdb
import xxhash

Walked: TypeAlias = tuple[int, int]
"""Keys of the payload: how many, and their sum."""


def fill_up(data: Path, environment: lmdb.Environment) -> None:
    """Extend a file that ends before its last page, with zeros that take no space.

    Reading a page behind the end of a mapped file ends the process (SIGBUS). A page of zeros is a CorruptError for
    whoever needs it. The last pages may be missing in a sound file, too: LMDB does not write those it freed at once.
    """
    wanted = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if data.stat().st_size < wanted:
        os.truncate(data, wanted)


def walk_keys(transaction: lmdb.Transaction, table: Any) -> Walked:
    """Every key of the payload. Raises ValueError for keys that are out of order: leaves in each other's place."""
    count = total = 0
    last = b""
    for key in map(bytes, transaction.cursor(table).iternext(keys=True, values=False)):
        if key <= last:
            raise ValueError(f"payload {key.hex()} comes after {last.hex()}")
        count += 1
        total += xxhash.xxh3_64_intdigest(key)
        last = key
    return count, total & (1 << 64) - 1


def main(folder: str) -> None:
    """Every record, every key of the payload, and a write that is taken back."""
    data = Path(folder) / "data.mdb"
    size = max(1 << 20, 2 * data.stat().st_size)
    with lmdb.open(folder, map_size=size, max_dbs=2, readahead=False) as environment:
        fill_up(data, environment)
        meta, payload = (environment.open_db(name, create=False) for name in (b"meta", b"payload"))
        with environment.begin() as transaction:
            for _ in transaction.cursor(meta):
                pass
            walked = walk_keys(transaction, payload)
        with environment.begin(write=True) as transaction:
            for table in (meta, payload):
                transaction.put(b"\x00walk", bytes(16), db=table)
            transaction.abort()
    print(*walked)


if __name__ == "__main__":
    main(sys.argv[1])
