"""A reader of an export is given up for its rate, not for the time that the store takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from meshrl.contract.errors import WaitTimeoutError
from meshrl.planning.loop import VirtualLoop
from meshrl.transferqueue.admin import for_fast_readers
from meshrl.transferqueue.store import Operation, Table

PIECE = [Operation(Table.PAYLOAD, b"", bytes(8 << 20))]


class Source:
    """Pieces of 8 MiB, each of which takes the store `takes_s`."""

    def __init__(self, count: int, takes_s: float) -> None:
        self.count = count
        self.takes_s = takes_s
        self.closed = False

    async def pieces(self) -> AsyncGenerator[Sequence[Operation], None]:
        try:
            for _ in range(self.count):
                await asyncio.sleep(self.takes_s)
                yield PIECE
        finally:
            self.closed = True


def read(source: Source, holds_s: float) -> int:
    """Pieces read by one that holds each for `holds_s`, in virtual time."""
    loop = VirtualLoop(7)

    async def reader() -> int:
        count = 0
        async for _ in for_fast_readers(source.pieces()):
            count += 1
            await asyncio.sleep(holds_s)
        return count

    try:
        return loop.run_until_complete(reader())
    finally:
        loop.close()


@pytest.mark.parametrize(
    ("count", "takes_s", "holds_s"),
    [(1000, 0, 7.9), (4, 0, 19.0), (3, 3600.0, 1.0), (1, 0, 59.0), (0, 0, 0)],
    ids=["1 MiB a second", "slow and short", "a slow store", "long once", "an empty store"],
)
def test_a_reader_that_is_fast_enough_gets_everything(
    count: int, takes_s: float, holds_s: float
) -> None:
    source = Source(count, takes_s)
    assert read(source, holds_s) == count
    assert source.closed


@pytest.mark.parametrize("holds_s", [119.0, 30.0, 9.0], ids=["stops", "halts", "crawls"])
def test_a_reader_below_one_mib_a_second_is_given_up(holds_s: float) -> None:
    source = Source(10_000, 0)
    with pytest.raises(WaitTimeoutError, match="given up: it was read at less than 1 MiB a second"):
        read(source, holds_s)
    assert source.closed


def test_a_reader_that_never_comes_back_keeps_nothing() -> None:
    source = Source(10, 0)
    loop = VirtualLoop(7)

    async def reader() -> None:
        pieces = for_fast_readers(source.pieces())
        await anext(pieces)
        await asyncio.sleep(59)
        assert not source.closed
        await asyncio.sleep(2)
        assert source.closed

    try:
        loop.run_until_complete(reader())
    finally:
        loop.close()
