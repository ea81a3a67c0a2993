"""Corrupted requests to the queue's servicer get a proper status and leave its ledger unchanged."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from meshrl.contract.errors import MeshError
from meshrl.contract.held_rows import HeldLeases
from meshrl.contract.types import REFERENCE_STAGE, REWARD_STAGE, ROLLOUT_STAGE, Ledger, Outcome
from meshrl.rpc.clients.queue import QueueClient
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.rpc.transport import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES
from meshrl.testing.contract.queue_actors import Actors, spec, task, tasks
from meshrl.testing.contract.queue_repeat_suite import more_of
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore
from meshrl.v1 import queue_pb2

from ..waiting import until
from .messages import Recorder, Request, corruptions_of

SEED = int(os.environ.get("FUZZ_SEED", "1"))
CALLS = int(os.environ.get("FUZZ_CALLS", "60"))
"""Corrupted calls of each method."""
METHODS: dict[str, MethodDescriptor] = dict(
    queue_pb2.DESCRIPTOR.services_by_name["Queue"].methods_by_name
)
WAIT_S = {name: 0.5 if name in QueueServicer.waits else 60.0 for name in METHODS}
"""Seconds of a corrupted call: some wait for what never comes, and a busy machine may take its time for others."""
PROPER = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.OUT_OF_RANGE,
}
"""The statuses of rpc/errors.py for mistakes of the caller and for waits; UNKNOWN and INTERNAL are bugs."""


@dataclass
class Scene:
    """A served queue with rows in every state, and a real request of every method."""

    server: GrpcServer
    actors: Actors
    requests: dict[str, list[Request]]
    channel: grpc.aio.Channel

    async def send(self, method: str, request: Request, wait_s: float = 0.0) -> grpc.StatusCode:
        """The status of a call made of bytes."""
        call = self.channel.stream_stream(f"/meshrl.v1.Queue/{method}")(
            iter(request), timeout=wait_s or WAIT_S[method]
        )
        try:
            async for _ in call:
                if method == "Attend":  # it is valid, and lasts until its caller ends it
                    call.cancel()
                    break
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async def ledger(self) -> Ledger:
        return await self.actors.ledger()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    queue = await TransferQueue.open(MemoryStore())
    settings = ServerSettings(metrics_port=None, drain_grace_s=1)
    async with GrpcServer(settings, [QueueServicer(queue)]) as server:
        requests = await recorded(server.address)
        options = [*CHANNEL_OPTIONS, ("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(server.address, options=options) as channel:
            yield Scene(server, Actors(queue), requests, channel)
    await queue.close()


async def recorded(address: str) -> dict[str, list[Request]]:
    """The requests of a short life, by method."""
    recorder = Recorder(address)
    proxy = grpc.aio.server()
    proxy.add_generic_rpc_handlers((recorder,))
    port = proxy.add_insecure_port("127.0.0.1:0")
    await proxy.start()
    try:
        async with QueueClient(f"127.0.0.1:{port}", retry_s=1) as client:
            await use_every_method(client)
            # Attend is a stream that is open as long as `renew_held` runs.
            keeping = asyncio.create_task(
                client.renew_held(HeldLeases("rollout", "idle", lambda lost: None))
            )
            await until(lambda: "/meshrl.v1.Queue/Attend" in recorder.requests)
            keeping.cancel()
        async with QueueClient(f"127.0.0.1:{port}", compression="zstd") as client:
            await client.fetch_rows("run", [], ["tokens"])
    finally:
        await proxy.stop(None)
        await recorder.close()
    return {method.rpartition("/")[2]: requests for method, requests in recorder.requests.items()}


async def use_every_method(client: QueueClient) -> None:
    """A short life of a run that uses the whole port and leaves rows in every state."""
    actors = Actors(client)
    stages = (ROLLOUT_STAGE, REWARD_STAGE, REFERENCE_STAGE)
    await actors.start(spec(max_staleness=20.0, stages=stages, max_attempts=1, lease_ttl_s=1e6))
    await actors.feed(tasks(12), cursor="12")
    for stage in ("rollout", "reward", "reference"):
        lease = await actors.lease(stage, limit=14)
        await client.renew("run", stage, "w", [row.uid for row in lease.rows])
        await actors.write(lease)
    await actors.train(0)
    await client.rewind("run", epoch=1, step=0)
    await actors.train(0)
    await actors.commit(1)
    batch = await actors.take(1, groups=1)
    await client.fetch_rows("run", [row.uid for row in batch.rows], ["tokens", "reward"])
    await client.filter("run", epoch=1, uids=[row.uid for row in batch.rows], reason="easy")
    await actors.take(2, groups=1)
    await client.redo("run", "reference", [lease.rows[-1].uid])
    lease = await actors.lease(limit=4)
    await client.append("run", "rollout", [more_of(lease.blocks[0], 0, 3)])
    first, *rest = lease.rows
    await client.fail("run", "rollout", first.uid, first.token, Outcome.TIMEOUT, "slow")
    await client.release("run", "rollout", {row.uid: row.token for row in rest[-1:]})
    assert await client.dead_letters("run")
    with suppress(MeshError):
        await client.replay("run", [first.uid])
    await actors.lease(limit=2)
    await client.why_waiting("run")
    await actors.ledger()
    await client.run_state("run")
    await client.open_run(spec("other"))
    await client.close_feed("other")


async def test_every_method_is_recorded(scene: Scene) -> None:
    assert set(scene.requests) == set(METHODS)


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].input_type.fields])
async def test_a_corrupted_request_gets_a_proper_status_and_changes_nothing(
    scene: Scene, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    dice = random.Random(f"{SEED} {method}")
    corruptions = corruptions_of(METHODS[method])
    refused = 0
    for _ in range(CALLS):
        request = dice.choice(corruptions)(list(dice.choice(scene.requests[method])), dice)
        before = await scene.ledger()
        with caplog.at_level(logging.ERROR):
            status = await scene.send(method, request)
        assert status in PROPER, (status, request, caplog.text)
        assert not caplog.records, (request, caplog.text)
        after = await scene.ledger()
        if status not in (grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED):
            refused += 1
            assert after == before, (status, request)
    assert refused, "no corruption was refused"
    await assert_serves(scene)


async def test_a_message_for_another_method_is_refused_or_understood(scene: Scene) -> None:
    for method in METHODS:
        for other, (request, *_) in scene.requests.items():
            if other != method:
                assert await scene.send(method, request) in PROPER, (method, other)
    await assert_serves(scene)


async def test_a_message_beyond_the_limit_is_refused_by_its_size(scene: Scene) -> None:
    before = await scene.ledger()
    status = await scene.send("Write", [bytes(MAX_MESSAGE_BYTES + 1)], wait_s=60)
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await scene.ledger() == before
    await assert_serves(scene)


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].client_streaming])
async def test_a_stream_that_is_cut_in_the_middle_changes_nothing(
    scene: Scene, method: str
) -> None:
    before = await scene.ledger()
    for request in scene.requests[method]:
        call = scene.channel.stream_stream(f"/meshrl.v1.Queue/{method}")()
        for message in request[:-1] or request:
            await call.write(message)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call.code()
    assert await scene.ledger() == before
    await assert_serves(scene)


async def test_bytes_that_are_no_grpc_at_all_leave_the_queue_serving(scene: Scene) -> None:
    dice = random.Random(SEED)
    for preface in (b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", scene.server.port)
        with suppress(ConnectionError):
            writer.write(preface + dice.randbytes(4096))
            await writer.drain()
            writer.write_eof()
            await reader.read()
        writer.close()
    await assert_serves(scene)


async def assert_serves(scene: Scene) -> None:
    """A new run goes from prompt to trained through the server that got the corrupted requests."""
    async with QueueClient(scene.server.address, retry_s=1) as client:
        actors = Actors(client, run="fresh")
        await actors.start(spec("fresh"))
        await actors.feed([task(name, "fresh") for name in "ab"])
        await actors.work()
        await actors.train(0)
        await actors.commit(1)
        assert (await actors.ledger()).trained == 4
