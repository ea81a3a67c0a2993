"""A process that writes to a disk store, commit after commit, for test_durability.py to kill or to cut off.

    python durable_writer.py FOLDER DURABILITY

Commit n rewrites what commit n-1 wrote: META `at` is n, PAYLOAD 0..KEYS-1 hold n. Prints n once it is acknowledged.
One value is long.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from meshrl.transferqueue.store import Operation, Table
from meshrl.transferqueue.stores.disk import DiskStore

KEYS = 8
VALUE_WORDS = (20_000, *[2_500] * (KEYS - 1))


def commit(number: int) -> list[Operation]:
    word = number.to_bytes(8, "big")
    payload = [
        Operation(Table.PAYLOAD, bytes([key]), word * VALUE_WORDS[key]) for key in range(KEYS)
    ]
    return [Operation(Table.META, b"at", number.to_bytes(8, "big")), *payload]


async def check(store: DiskStore) -> int:
    """The commit that the store is at; everything in it must be of that commit."""
    meta = dict(await store.load())
    at = meta.get(b"at", bytes(8))
    values = await store.read([bytes([key]) for key in range(KEYS)])
    for value, words in zip(values, VALUE_WORDS, strict=True):
        assert value == (at * words if any(at) else None), "a torn commit"
    return int.from_bytes(at, "big")


async def main(folder: Path, durability: str) -> None:
    store = DiskStore(folder, durability=durability, grow_bytes=1 << 20)
    number = await check(store)
    while True:
        number += 1
        await store.apply(commit(number))
        print(number, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
