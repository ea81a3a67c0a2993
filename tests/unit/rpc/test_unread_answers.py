"""Clients that do not read their answers: the space that these take, who is kept out, and when it ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

import grpc
import numpy as np
import pytest

from meshrl.contract.errors import BusyError, UnavailableError
from meshrl.contract.types import ROLLOUT_STAGE
from meshrl.rpc import call_limits, interceptors
from meshrl.rpc.call_limits import SMALL_BYTES, CallLimits
from meshrl.rpc.clients.base import Connection
from meshrl.rpc.clients.queue import QueueTable
from meshrl.rpc.credentials import MeshRole
from meshrl.rpc.identity import ANYBODY, CALLER
from meshrl.rpc.interceptors import ANSWERED, Context, collected
from meshrl.rpc.servicers import QueueServicer
from meshrl.testing.contract.queue_actors import WAIT_S, Actors, spec, tasks
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from ...simulation.virtual_time import in_virtual_time, run
from ...waiting import until
from .test_call_limits import Message
from .test_interceptors import EchoServicer, echoing, method

LEASE = QueueTable.methods["Lease"]
PROMPT = 50_000
"""Tokens of a prompt; four bytes each."""
ROWS = 8


@dataclass
class Call:
    """A call, as gRPC reports it, whose answers nobody reads."""

    address: str = "10.0.0.1"
    written: int = 0
    over: list[Callable[[object], None]] = field(default_factory=list)

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return f"ipv4:{self.address}:50250"

    def add_done_callback(self, done: Callable[[object], None]) -> None:
        self.over.append(done)

    async def write(self, message: object) -> None:
        self.written += 1
        await asyncio.get_running_loop().create_future()


async def started(rows: int) -> tuple[TransferQueue, Actors]:
    """A queue with a run of groups of one row, whose prompts take 200 kB; its workers wait already."""
    queue = await TransferQueue.open(MemoryStore())
    actors = Actors(queue)
    await actors.start(spec(group_size=1, batch_groups=rows, max_attempts=1))
    return queue, actors


def lease_call(queue: TransferQueue, limits: CallLimits, role: MeshRole) -> Callable[..., Any]:
    """Calls Lease as gRPC does, in a role."""
    servicer = QueueServicer(queue)

    async def called(request: Any, context: Context) -> None:
        async with aclosing(servicer.Lease(request, context)) as messages:
            async for message in messages:
                await context.write(message)

    within = limits.by_role(LEASE.path, called)

    async def identified(request: Any, context: Context) -> Any:
        CALLER.set(replace(ANYBODY, roles=frozenset((role,))))
        return await within(request, context)

    return limits.by_address(LEASE.path, identified)


def request(actors: Actors, worker: str) -> Any:
    return LEASE.encode_arguments(
        ["run"], ROLLOUT_STAGE.name, worker=worker, limit=1, version=actors.version, wait_s=60.0
    )


@in_virtual_time
async def test_leases_that_wait_get_no_more_rows_at_once_than_answers_may_hold() -> None:
    queue, actors = await started(ROWS)
    limits = CallLimits(answer_bytes=5 * 4 * PROMPT)  # one address: three answers
    call = lease_call(queue, limits, MeshRole.ROLLOUT)
    contexts = [Call() for _ in range(ROWS)]
    waiting = [
        asyncio.create_task(call(request(actors, f"w{number}"), context))
        for number, context in enumerate(contexts)
    ]
    await asyncio.sleep(0.1)
    prompt = np.zeros(PROMPT, dtype=np.int32)
    await actors.feed(tasks(ROWS, group_size=1, prompt_ids=prompt))
    await asyncio.sleep(0.1)
    refused = [task for task in waiting if task.done()]
    for task in refused:
        with pytest.raises(BusyError, match=r"10\.0\.0\.1 holds \d+ bytes of answers here"):
            task.result()
    assert sum(context.written for context in contexts) == 3
    assert len(refused) == ROWS - 3
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    lease = await actors.lease(wait_s=WAIT_S)
    assert [row.delivery for row in lease.rows] == [1] * ROWS, "no attempt was made with any"
    assert not await queue.dead_letters("run")
    await queue.close()


@in_virtual_time
async def test_rows_of_an_answer_that_broke_off_are_there_for_the_next_at_once() -> None:
    queue, actors = await started(1)
    await actors.feed(tasks(1, group_size=1))
    call = lease_call(queue, CallLimits(), MeshRole.ROLLOUT)
    broken = asyncio.create_task(call(request(actors, "w"), Call()))
    await asyncio.sleep(0.1)
    broken.cancel()
    await asyncio.gather(broken, return_exceptions=True)
    lease = await actors.lease(worker="other")
    assert [row.delivery for row in lease.rows] == [1]
    await queue.close()


@in_virtual_time
async def test_an_answer_larger_than_the_share_is_given_to_whoever_holds_no_other() -> None:
    queue, actors = await started(2)
    await actors.feed(tasks(2, group_size=1, prompt_ids=np.zeros(PROMPT, dtype=np.int32)))
    call = lease_call(queue, CallLimits(answer_bytes=PROMPT), MeshRole.ROLLOUT)
    context = Call()
    unread = asyncio.create_task(call(request(actors, "w"), context))
    await asyncio.sleep(0.1)
    assert context.written == 1
    with pytest.raises(BusyError):
        await call(request(actors, "v"), Call("10.0.0.2"))
    unread.cancel()
    await asyncio.gather(unread, return_exceptions=True)
    await queue.close()


@in_virtual_time
async def test_no_role_keeps_another_of_its_address_from_its_answers() -> None:
    limits = CallLimits(answer_bytes=100)

    async def answer(size: int, context: Context) -> None:
        ANSWERED.get()(size)
        await context.write(bytes(size))

    async def call(role: MeshRole, size: int) -> None:
        CALLER.set(replace(ANYBODY, roles=frozenset((role,))))
        await limits.by_role("/any", answer)(size, cast("Context", Call()))

    held = [asyncio.create_task(call(role, 75)) for role in MeshRole]
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in held)
    for role in MeshRole:
        with pytest.raises(BusyError):
            await call(role, 1)
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)


@in_virtual_time
async def test_a_single_large_answer_is_counted_until_it_is_sent() -> None:
    limits = CallLimits(calls=2, answer_bytes=3 * SMALL_BYTES)
    size = 2 * SMALL_BYTES

    async def answer(_: Any, context: Context) -> bytes:
        return bytes(size)

    call = limits.by_address("/any", limits.by_role("/any", answer))
    context = Call()
    await call(b"", cast("Context", context))
    with pytest.raises(BusyError, match="holds 1 calls here"):
        await call(b"", cast("Context", Call()))
    for over in context.over:
        over(context)
    await call(b"", cast("Context", Call()))


class Slow(EchoServicer):
    """Answers that are larger than what the two ends keep on the way."""

    async def say(self, request: bytes, context: Context) -> bytes:
        self.waiting.set()
        return bytes(8 << 20)


async def one_answer(channel: grpc.aio.Channel) -> Any:
    return channel.unary_stream("/test.Echo/Say")(b"")


async def a_stream(channel: grpc.aio.Channel) -> Any:
    return channel.unary_stream("/test.Echo/Wait")(b"")


@pytest.mark.parametrize("begin", [one_answer, a_stream])
async def test_a_caller_that_does_not_read_loses_its_connection_and_what_it_held(
    begin: Callable[[grpc.aio.Channel], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptors, "PATIENCE_S", 0.2)
    monkeypatch.setattr(interceptors, "LEAST_RATE", 1 << 40)
    monkeypatch.setattr(call_limits, "DISCONNECT_S", 0.1)
    servicer = Slow()
    async with (
        echoing(servicer, limits=CallLimits(calls=2)) as (_, server, channel),
        grpc.aio.insecure_channel(server.address) as reads,
    ):
        unread = await begin(channel)
        await servicer.waiting.wait()

        await until(unread.done)
        assert await unread.code() is grpc.StatusCode.UNAVAILABLE
        connection = Connection("echo", server.address, retry_s=60, connect=lambda _: reads)
        repeat = method("Repeat", "unary_stream", request=b"again")
        answer = await connection.call(repeat, Message(5), list)
        assert answer == [b"first", b"again"], "its place is free"


PIECE = bytes(8 << 20)


async def disconnected_after(count: int, *, takes_s: float, holds_s: float) -> float:
    """Write pieces of 8 MiB, each ready after `takes_s`, to a caller that reads one in `holds_s`, in virtual time.

    Returns seconds from the begin to the end of its connection; infinite if all pieces were read.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    ended: list[float] = []

    class Reads(Call):
        async def write(self, message: object) -> None:
            await asyncio.sleep(holds_s)

    async def answer(_: Any, context: Context) -> None:
        for _ in range(count):
            await asyncio.sleep(takes_s)
            await context.write(PIECE)

    async def watched() -> None:
        await CallLimits().by_role("/any", answer)(b"", cast("Context", Reads()))

    call = asyncio.create_task(watched())

    def disconnect(peers: Any) -> None:
        assert list(peers) == ["10.0.0.1:50250"]
        ended.append(loop.time() - began)
        call.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_limits, "disconnect", disconnect)
        await asyncio.wait([call])
    return ended[0] if ended else math.inf


@pytest.mark.parametrize(
    ("count", "takes_s", "holds_s"),
    [(1000, 0, 7.9), (4, 0, 19.0), (3, 3600.0, 1.0), (1, 0, 59.0), (0, 0, 0)],
    ids=["1 MiB a second", "slow and short", "a slow store", "long once", "nothing"],
)
def test_a_caller_that_reads_fast_enough_gets_everything(
    count: int, takes_s: float, holds_s: float
) -> None:
    reading = disconnected_after(count, takes_s=takes_s, holds_s=holds_s)
    assert run(0, reading) == math.inf


@pytest.mark.parametrize(
    ("holds_s", "ends_s"),
    [(math.inf, 69), (30.0, 99), (9.0, 550)],
    ids=["stops", "halts", "crawls"],
)
def test_a_caller_that_reads_less_than_one_mib_a_second_is_disconnected(
    holds_s: float, ends_s: float
) -> None:
    found = run(0, disconnected_after(10_000, takes_s=0, holds_s=min(holds_s, 1e6)))
    assert found <= ends_s


@in_virtual_time
async def test_a_streamed_request_that_stops_halfway_ends_and_holds_nothing() -> None:
    limits = CallLimits(request_bytes=1000)

    async def stops() -> AsyncIterator[Message]:
        yield Message(700)
        await asyncio.get_running_loop().create_future()

    async def write(requests: Any, context: Context) -> None:
        await collected(requests)

    call = limits.by_address("/any", write)
    began = asyncio.get_running_loop().time()
    stopped = asyncio.create_task(call(stops(), cast("Context", Call())))
    await asyncio.sleep(1)
    with pytest.raises(BusyError):
        await call(bytes(700), cast("Context", Call()))
    with pytest.raises(UnavailableError, match="sent 700 bytes and did not end"):
        await stopped
    assert asyncio.get_running_loop().time() - began < 61
    await call(no_more(), cast("Context", Call()))


async def no_more() -> AsyncIterator[Message]:
    yield Message(700)


class Collects(EchoServicer):
    """Reads a streamed request as servicers do."""

    async def join(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        self.waiting.set()
        return b"%d" % len(await collected(Message(len(request)) async for request in requests))


async def test_the_caller_is_told_that_its_request_did_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interceptors, "PATIENCE_S", 0.2)
    async with echoing(Collects()) as (_, _, channel):
        call = channel.stream_unary("/test.Echo/Join")()
        await call.write(b"a")
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        again = channel.stream_unary("/test.Echo/Join")(iter([b"a", b"b"]))
        assert await again == b"2"
