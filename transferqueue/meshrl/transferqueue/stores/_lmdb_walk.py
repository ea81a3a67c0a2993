"""Walks an LMDB file as its queue will, in a separate process, because LMDB calls abort() on some damaged pages.

    python _lmdb_walk.py FOLDER

Exits with 0 for a file whose trees can be walked and written, and prints the number and the sum of the payload's
keys; with a signal or an error for any other. Imports nothing of meshrl, so that it starts at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, TypeAlias

import lmdb
import numpy as np
import xxhash

Walked: TypeAlias = tuple[int, int]
"""The number of payload keys, and the sum of their hashes."""


def fill_up(data: Path, environment: lmdb.Environment) -> None:
    """Extend a file that ends before its last page, with zeros that take no space.

    Reading a page behind the end of a mapped file ends the process (SIGBUS). Reading a page of zeros raises
    CorruptError. The last pages may be missing in a sound file, too: LMDB does not write pages that it frees at
    once.
    """
    wanted = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if data.stat().st_size < wanted:
        os.truncate(data, wanted)


def walk_payload(transaction: lmdb.Transaction, table: Any, file: range) -> Walked:
    """Check every key of the payload and the place of its value; the values themselves are not read.

    Raises:
        ValueError: keys that are out of order: leaves in each other's place. Or a value that does not lie within
            `file`, the addresses at which it is mapped: its length is wrong, and reading it would end the process.
    """
    count = total = 0
    last = b""
    for view, value in transaction.cursor(table):
        key = bytes(view)
        if key <= last:
            raise ValueError(f"payload {key.hex()} comes after {last.hex()}")
        if len(value):
            start, _ = np.frombuffer(value, np.uint8).__array_interface__["data"]
            if start not in file or start + len(value) > file.stop:
                raise ValueError(f"payload {key.hex()} ends behind the file: {len(value)} bytes")
        count += 1
        total += xxhash.xxh3_64_intdigest(key)
        last = key
    return count, total & (1 << 64) - 1


def mapped(data: Path) -> range:
    """The addresses at which this process has mapped a file; all addresses where no system call says (not Linux)."""
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        if line.endswith(f" {data.resolve()}"):
            start = int(line.partition("-")[0], 16)
            return range(start, start + data.stat().st_size)
    return range(1 << 64)


def main(folder: str) -> None:
    """Read every record and every payload key, and begin a write that is aborted."""
    data = Path(folder) / "data.mdb"
    size = max(1 << 20, 2 * data.stat().st_size)
    with lmdb.open(folder, map_size=size, max_dbs=2, readahead=False) as environment:
        fill_up(data, environment)
        meta, payload = (environment.open_db(name, create=False) for name in (b"meta", b"payload"))
        with environment.begin() as transaction:
            for _ in transaction.cursor(meta):
                pass
        with environment.begin(buffers=True) as transaction:
            walked = walk_payload(transaction, payload, mapped(data))
        with environment.begin(write=True) as transaction:
            for table in (meta, payload):
                transaction.put(b"\x00walk", bytes(16), db=table)
            transaction.abort()
    print(*walked)


if __name__ == "__main__":
    main(sys.argv[1])
