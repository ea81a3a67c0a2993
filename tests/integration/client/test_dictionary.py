"""Short rows between a queue that has a dictionary and clients that ask for it, or know another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshrl.contract import codec
from meshrl.contract.codec.compression import KNOWS_DICTIONARY, TAKES_SQUEEZED, train_dictionary
from meshrl.contract.errors import UserError
from meshrl.contract.frames import pack
from meshrl.contract.types import Lease, LeasedRow, RowWrite, StageSpec, siblings
from meshrl.rpc.clients import QueueClient
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue
from meshrl.v1 import queue_pb2 as pb

from ...contract.queue_actors import told_of
from .people import STAGE, answer, spec, tasks
from .test_compressed_wire import fetched

SAMPLES = [
    pack([{"tokens": np.random.default_rng(seed).zipf(1.3, 40).clip(max=999).astype(np.int32)}])
    for seed in range(400)
]
FIRST, SECOND = train_dictionary(SAMPLES[:200]), train_dictionary(SAMPLES[200:])


@asynccontextmanager
async def serving(
    queue: TransferQueue, dictionary: bytes, port: int = 0
) -> AsyncIterator[GrpcServer]:
    settings = ServerSettings(metrics_port=None, drain_grace_s=0, port=port)
    async with GrpcServer(settings, [QueueServicer(queue, dictionary)]) as server:
        yield server


def long(row: LeasedRow) -> RowWrite:
    """Forty tokens that look like those of SAMPLES."""
    short = answer(row)
    assert short.facts is not None
    tokens = np.random.default_rng(500).zipf(1.3, 40).clip(max=999).astype(np.int32)
    columns = {**short.columns, "tokens": tokens, "loss_mask": np.ones(40, np.uint8)}
    return RowWrite(uid=row.uid, columns=columns, facts=short.facts._replace(num_tokens=40))


async def write(wire: QueueClient, lease: Lease) -> None:
    await wire.write("run", "rollout", lease.token_of(), [long(row) for row in lease.rows])


async def lease(wire: QueueClient) -> Lease:
    return await wire.lease(["run"], "rollout", worker="w", limit=2, wait_s=5)


async def test_rows_survive_a_queue_that_comes_back_with_another_dictionary() -> None:
    queue = await TransferQueue.open(stores.build(QueueConfig(store="memory"), Path("unused")))
    async with serving(queue, FIRST) as server:
        port = int(server.address.rpartition(":")[2])
        wire = QueueClient(server.address, patience_s=20, compression="zstd")
        await wire.open_run(spec())
        assert await wire.admit("run", tasks(3), cursor="", wait_s=5) == 3
        await write(wire, await lease(wire))
        held = await lease(wire)
    for dictionary in (SECOND, b""):
        async with serving(queue, dictionary, port):
            await write(wire, held)
            rows = [*held.rows]
            found = await wire.fetch("run", [row.uid for row in rows], ["tokens"])
            for row, columns in zip(rows, found, strict=True):
                assert columns["tokens"].tolist() == long(row).columns["tokens"].tolist()
            if dictionary:
                held = await lease(wire)
    await wire.close()
    await queue.close()


async def test_an_answer_on_its_way_is_read_whatever_becomes_of_another_call() -> None:
    queue = await TransferQueue.open(stores.build(QueueConfig(store="memory"), Path("unused")))
    score = StageSpec(name="score", reads=("tokens",), writes=("score",))
    async with (
        serving(queue, FIRST) as server,
        QueueClient(server.address, patience_s=5, compression="zstd") as wire,
        QueueClient(server.address, patience_s=5, compression="zstd") as other,
    ):
        await wire.open_run(spec(stages=(STAGE, score)))
        await wire.admit("run", tasks(2), cursor="", wait_s=5)
        held, more = await lease(other), await lease(wire)
        waiting = asyncio.create_task(wire.lease(["run"], "score", worker="s", limit=2, wait_s=30))
        await told_of(queue, lambda wait: "rows of stage score" in wait.what)
        with pytest.raises(UserError, match="column"):
            rows = [replace(long(row), columns={"nonsense": np.zeros(99)}) for row in more.rows]
            await wire.write("run", "rollout", more.token_of(), rows)
        await write(other, held)
        leased = await asyncio.wait_for(waiting, 30)
        assert [len(row.columns["tokens"]) for row in leased.rows] == [40, 40]
    await queue.close()


async def test_only_who_names_the_dictionary_is_answered_with_it() -> None:
    queue = await TransferQueue.open(stores.build(QueueConfig(store="memory"), Path("unused")))
    async with (
        serving(queue, FIRST) as server,
        QueueClient(server.address, patience_s=5, compression="zstd") as wire,
    ):
        await wire.open_run(spec())
        await wire.admit("run", tasks(1), cursor="", wait_s=5)
        held = await lease(wire)
        await write(wire, held)
        named = siblings("run", [row.uid for row in held.rows])
        request = pb.FetchRowsRequest(run="run", columns=["tokens"], rows=codec.encode_rows(named))
        number = dict(wire._peer.metadata)[KNOWS_DICTIONARY]
        without = await fetched(server.address, request, TAKES_SQUEEZED)
        other = await fetched(server.address, request, TAKES_SQUEEZED, (KNOWS_DICTIONARY, "1234"))
        with_it = await fetched(server.address, request, TAKES_SQUEEZED, (KNOWS_DICTIONARY, number))
    assert other == without
    assert len(with_it) < len(without)
    await queue.close()
