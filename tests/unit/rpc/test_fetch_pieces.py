"""An answer of Fetch is read and sent piece by piece, and what is in memory of all answers is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, cast

import numpy as np
import pytest

from meshrl.contract import codec
from meshrl.contract.errors import BusyError
from meshrl.contract.frames import Frame, pack
from meshrl.contract.ports import Reserve
from meshrl.contract.types import RowBlock
from meshrl.rpc.call_limits import CallLimits
from meshrl.rpc.interceptors import Context
from meshrl.rpc.servicers import FETCH_BYTES, FIRST_GROUPS, QueueServicer
from meshrl.v1 import queue_pb2 as pb

from ...waiting import until

FETCH = "/meshrl.v1.Queue/Fetch"
GROUPS = 24
GROUP_BYTES = 4_000_000


class Call:
    """A call as gRPC reports it."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:10.0.0.1:50250"

    def add_done_callback(self, done: Callable[[object], None]) -> None:
        done(self)


CONTEXT = cast("Context", Call())


class Payload:
    """A queue that has GROUP_BYTES of each group, and counts the groups that were read."""

    def __init__(self) -> None:
        frame = pack([{"tokens": np.zeros(GROUP_BYTES // 4, dtype=np.int32)}])
        self.frame = Frame(frame)
        self.read: list[int] = []

    async def fetch(
        self, run: str, blocks: Sequence[RowBlock], columns: Sequence[str], *, reserve: Reserve
    ) -> list[RowBlock]:
        reserve(len(blocks) * GROUP_BYTES)
        self.read.append(len(blocks))
        return [
            RowBlock(task=b.task, indices=b.indices, attempts=b.attempts, frames=(self.frame,))
            for b in blocks
        ]


def asked(count: int) -> list[RowBlock]:
    return [RowBlock(task=f"task{n}", indices=(0,), attempts=(0,)) for n in range(count)]


def request(count: int) -> pb.FetchRowsRequest:
    return pb.FetchRowsRequest(run="run", rows=codec.encode_rows(asked(count)), columns=["tokens"])


async def test_a_caller_that_reads_no_further_has_one_piece_in_memory() -> None:
    queue = Payload()
    servicer = QueueServicer(cast("Any", queue))
    async with aclosing(servicer.Fetch(request(GROUPS), CONTEXT)) as messages:
        await anext(messages)
        assert queue.read == [FIRST_GROUPS]
        rest = [message async for message in messages]
    assert sum(queue.read) == GROUPS
    assert max(queue.read) * GROUP_BYTES <= FETCH_BYTES
    assert len(rest) == GROUPS - 1


@pytest.mark.parametrize("count", [0, 1, FIRST_GROUPS, FIRST_GROUPS + 1, GROUPS])
async def test_an_answer_in_pieces_is_one_answer(count: int) -> None:
    servicer = QueueServicer(cast("Any", Payload()))
    messages = [message async for message in servicer.Fetch(request(count), CONTEXT)]
    blocks = codec.decode_fetched(messages, asked(count))
    assert [block.task for block in blocks] == [f"task{n}" for n in range(count)]


async def test_answers_that_nobody_reads_are_bounded_and_their_bytes_come_back() -> None:
    limits = CallLimits(answer_bytes=4 * FETCH_BYTES)
    servicer = QueueServicer(cast("Any", Payload()))
    begun: list[int] = []

    async def read_one(_: Any, context: Context) -> None:
        async with aclosing(servicer.Fetch(request(GROUPS), context)) as messages:
            begun.append(len((await anext(messages)).frames))
            await asyncio.Event().wait()

    async def read_all(_: Any, context: Context) -> None:
        messages = [message async for message in servicer.Fetch(request(GROUPS), context)]
        assert len(messages) == GROUPS

    stands_still = limits.by_role(FETCH, read_one)
    tasks = [asyncio.create_task(stands_still(b"", CONTEXT)) for _ in range(3)]
    await until(lambda: len(begun) == 3)
    with pytest.raises(BusyError, match=r"10\.0\.0\.1 holds \d+ bytes of answers here"):
        await stands_still(b"", CONTEXT)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(8):
        assert await limits.by_role(FETCH, read_all)(b"", CONTEXT) is None
