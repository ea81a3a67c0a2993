"""The client decides whether payload is compressed; its rows are the same."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from meshrl.client import LeasedRow, Queue, RowWrite
from meshrl.contract import codec
from meshrl.contract.codec.bulk import TAKES_COMPRESSED, Mode
from meshrl.contract.types import blocks_of
from meshrl.v1 import queue_pb2 as pb
from meshrl.v1 import queue_pb2_grpc as rpc

from .client_scenes import answer, queue_process, spec, tasks


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with queue_process(tmp_path_factory.mktemp("queue")) as address:
        yield address


async def fetched(address: str, request: pb.FetchRowsRequest, *metadata: tuple[str, str]) -> bytes:
    """The frame of the answer, as it was sent."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = rpc.QueueStub(channel).Fetch(request, metadata=metadata)
        (frame,) = [frame async for message in call for frame in message.frames]
        return frame


def long_row(row: LeasedRow) -> RowWrite:
    short = answer(row)
    assert short.facts is not None
    return RowWrite(
        uid=row.uid,
        columns={
            **short.columns,
            "tokens": np.arange(5000, dtype=np.int32),
            "loss_mask": np.ones(5000, dtype=np.uint8),
        },
        facts=short.facts._replace(num_tokens=5000),
    )


@pytest.mark.parametrize("mode", ["zstd", "off"])
async def test_payload_is_sent_compressed_to_a_caller_that_asks_for_it(
    address: str, mode: Mode
) -> None:
    async with Queue.connect(address, compression=mode) as queue:
        run = await queue.open_run(spec(mode))
        await run.put(tasks(1, mode))
        async with run.lease("rollout", limit=2) as lease:
            await lease.write([long_row(row) for row in lease.rows])
        async for batch in run.batches(groups=1):
            assert [len(columns["tokens"]) for columns in batch.columns] == [5000, 5000]
            assert batch.columns[1]["tokens"].tolist() == list(range(5000))
            break
        uids = [row.uid for row in batch.rows]
    request = pb.FetchRowsRequest(
        run=mode, rows=codec.encode_rows(blocks_of(mode, uids)), columns=["tokens"]
    )
    plain = await fetched(address, request)
    small = await fetched(address, request, TAKES_COMPRESSED)
    assert len(plain) > 2 * 4 * 5000
    assert len(small) < len(plain) / 2
