"""Calls with payload past gRPC, by a socket of this machine: who gets in, what a broken caller leaves."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import uvloop
from prometheus_client import generate_latest

from meshrl.contract import codec
from meshrl.contract.errors import (
    CapacityError,
    FencedError,
    ForbiddenError,
    NotFoundError,
    UnauthenticatedError,
)
from meshrl.contract.frames import pack
from meshrl.contract.types import ROLLOUT_STAGE, Lease, PackedGroup, RunSpec, Task, Version
from meshrl.rpc import credentials
from meshrl.rpc.call_limits import CallLimits
from meshrl.rpc.clients import QueueClient
from meshrl.rpc.credentials import Credential, MeshRole, ensure_credentials
from meshrl.rpc.local_socket import client as client_end
from meshrl.rpc.local_socket import server
from meshrl.rpc.local_socket import wire as wires
from meshrl.rpc.local_socket.client import LocalSocket
from meshrl.rpc.local_socket.wire import Kind, Wire, WireError
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.testing.contract.queue_actors import rollout_of
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import build
from meshrl.v1 import queue_pb2 as pb
from meshrl.v1.local_socket_pb2 import CallEnd, CallHead

from ..waiting import until

SPEC = RunSpec(run="run", group_size=2, batch_groups=1, max_staleness=1, stages=(ROLLOUT_STAGE,))
NOW = Version(1, 0)
LEASE, WRITE = "/meshrl.v1.Queue/Lease", "/meshrl.v1.Queue/Write"
WAITING = pb.LeaseRequest(
    runs=["run"], stage="rollout", worker="w", limit=1, version=codec.encode_version(NOW), wait_s=60
)


@asynccontextmanager
async def serving(
    limits: CallLimits | None = None, **settings: Any
) -> AsyncIterator[tuple[GrpcServer, QueueServicer, TransferQueue]]:
    queue = await TransferQueue.open(build(QueueConfig(store="memory"), Path()))
    servicer = QueueServicer(queue)
    given = ServerSettings(metrics_port=None, drain_grace_s=1, **settings)
    try:
        async with GrpcServer(given, [servicer], limits=limits) as server:
            yield server, servicer, queue
    finally:
        await queue.close()


async def start_run(queue: TransferQueue, tasks: int = 1) -> None:
    await queue.open_run(SPEC)
    await queue.acquire("run", "trainer")
    await queue.publish("run", NOW)
    prompt = np.arange(3, dtype=np.int32)
    given = [
        Task(run="run", task_id=str(number), prompt_ids=prompt, group_size=2)
        for number in range(tasks)
    ]
    await queue.admit("run", given, cursor="", wait_s=1)


async def leased(queue: Any, wait_s: float = 5) -> Lease:
    return await queue.lease(["run"], "rollout", worker="w", limit=2, version=NOW, wait_s=wait_s)


async def write(queue: Any, lease: Lease) -> None:
    writes = [rollout_of(row, NOW) for row in lease.rows]
    tokens = {row.uid: row.token for row in lease.rows}
    await queue.write("run", "rollout", tokens, writes)


async def wire_to(servicer: QueueServicer) -> Wire:
    local = LocalSocket()
    local.named(servicer.local_socket)
    wire = await local.free_wire()
    assert wire is not None
    return wire


async def call(wire: Wire, method: str, *messages: bytes, **metadata: str) -> CallEnd:
    """A whole call; how it ended."""
    head = CallHead(method=method, metadata=metadata)
    await wire.send(Kind.HEAD, [head.SerializeToString()])
    for message in messages:
        await wire.send(Kind.MESSAGE, [message])
    await wire.send(Kind.END)
    kind, data = await wire.receive()
    while kind is not Kind.END:
        kind, data = await wire.receive()
    return CallEnd.FromString(bytes(data))


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_an_answer_names_the_socket_and_calls_with_payload_need_no_grpc_from_then_on(
    run: Any,
) -> None:
    """Services run on uvloop, commands and notebooks may not."""
    run(trip())


async def trip() -> None:
    async with serving() as (server, servicer, queue), QueueClient(server.address) as client:
        await start_run(queue, tasks=2)
        assert client.local_socket.name == ""
        first = await leased(client)
        assert client.local_socket.name == servicer.local_socket
        await client._connection.channel.close(None)
        await write(client, first)
        await write(client, await leased(client))
        assert (await queue.ledger("run")).resident["ready"] == 4
        with pytest.raises(
            FencedError, match=r"row run/0/0\.0, stage rollout: token 9 is fenced"
        ) as raised:
            stale = [PackedGroup(**{**vars(group), "token": 9}) for group in packed(first)]
            await client.write_packed("run", "rollout", stale)
        assert raised.value.details == {"uid": "run/0/0.0"}
        with pytest.raises(NotFoundError):
            await client.fetch("none", [], [])


def packed(lease: Lease) -> list[PackedGroup]:
    return [
        PackedGroup(
            task=group.task,
            indices=group.indices,
            attempts=group.attempts,
            token=group.token,
            frame=pack([rollout_of(row, NOW).columns for row in lease.rows]),
        )
        for group in lease.groups
    ]


async def test_no_socket_is_named_where_certificates_say_who_calls_or_the_recipe_wants_none() -> (
    None
):
    async with serving(local_socket=False) as (server, servicer, queue):
        async with QueueClient(server.address) as client:
            await start_run(queue)
            await write(client, await leased(client))
        assert (servicer.local_socket, client.local_socket.name) == ("", "")


async def test_the_socket_asks_for_the_credential_that_grpc_asks_for(tmp_path: Path) -> None:
    ensure_credentials(tmp_path)
    verifiers = credentials.verifiers_file(tmp_path)

    def of(role: MeshRole) -> Credential:
        return Credential(credentials.file_of_role(tmp_path, role))

    async with serving(verifiers=verifiers) as (server, servicer, queue):
        await start_run(queue)
        for credential, error in (
            (Credential("wrong"), UnauthenticatedError),
            (of(MeshRole.READER), ForbiddenError),
        ):
            async with QueueClient(server.address, credential=credential) as client:
                client.local_socket.named(servicer.local_socket)
                with pytest.raises(error):
                    await leased(client)
        wire = await wire_to(servicer)
        assert (await call(wire, LEASE, b"")).code == grpc.StatusCode.UNAUTHENTICATED.value[0]
        async with QueueClient(server.address, credential=of(MeshRole.ROLLOUT)) as client:
            client.local_socket.named(servicer.local_socket)
            await write(client, await leased(client))


async def test_a_method_without_payload_is_not_served_and_a_refused_call_leaves_the_connection_whole() -> (
    None
):
    limits = CallLimits(request_bytes=1_000)
    async with serving(limits) as (_, servicer, queue):
        await start_run(queue)
        wire = await wire_to(servicer)
        end = await call(wire, "/meshrl.v1.Queue/Publish", b"")
        assert end.code == grpc.StatusCode.UNIMPLEMENTED.value[0]
        large = pb.WriteRequest(frames=[bytes(2_000)]).SerializeToString()
        end = await call(wire, WRITE, large, b"\xff" * 300)
        assert end.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        end = await call(wire, WRITE, b"\xff" * 300)
        assert (end.code, end.message) == (
            grpc.StatusCode.INVALID_ARGUMENT.value[0],
            f"{WRITE}: the request cannot be parsed as this method's message (a varint of more than ten bytes)",
        )
        assert (await call(wire, LEASE, WAITING.SerializeToString())).code == 0


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"\x02\0\0\0" + (65 << 20).to_bytes(4, "little"), id="too large a message"),
        pytest.param(b"\x01\0\0\0" + (1 << 20).to_bytes(4, "little"), id="too large a head"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="another protocol"),
        pytest.param(b"\x03\0\0\0\0\0\0\0", id="an end without a call"),
        pytest.param(b"\x01\0\0\0\x01\0\0\0\xff", id="a head that cannot be parsed"),
        pytest.param(b"\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0", id="a call within a call"),
    ],
)
async def test_who_sends_what_is_no_call_is_cut_off_and_others_are_not(sent: bytes) -> None:
    async with serving() as (_, servicer, queue):
        await start_run(queue)
        wire = await wire_to(servicer)
        wire._transport.write(sent)
        with pytest.raises(WireError):
            await wire.receive()
        other = await wire_to(servicer)
        assert (await call(other, LEASE, WAITING.SerializeToString())).code == 0


async def test_a_lease_whose_caller_goes_away_takes_no_rows() -> None:
    async with serving() as (server, servicer, queue):
        await start_run(queue, tasks=0)
        wire = await wire_to(servicer)
        await wire.send(Kind.HEAD, [CallHead(method=LEASE).SerializeToString()])
        await wire.send(Kind.MESSAGE, [WAITING.SerializeToString()])
        await wire.send(Kind.END)
        local: Any = server._local
        await until(lambda: local._answering)
        wire.close()
        await until(lambda: not local._callers)
        prompt = np.arange(3, dtype=np.int32)
        await queue.admit(
            "run",
            [Task(run="run", task_id="0", prompt_ids=prompt, group_size=2)],
            cursor="",
            wait_s=1,
        )
        assert len((await leased(queue)).rows) == 2


async def test_a_caller_that_stops_in_the_middle_is_cut_off_and_no_call_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wires, "STALLED_S", 0.2)
    async with serving() as (server, servicer, queue):
        between, within = await wire_to(servicer), await wire_to(servicer)
        for wire in (between, within):
            await wire.send(Kind.HEAD, [CallHead(method=WRITE).SerializeToString()])
        within._transport.write(b"\x02\0\0\0\x08\0\0\0half")
        for wire in (between, within):
            with pytest.raises(WireError):
                await wire.receive()
        await start_run(queue, tasks=0)
        prompt = np.zeros(4 << 20, np.int32)
        task = Task(run="run", task_id="0", prompt_ids=prompt, group_size=2)
        await queue.admit("run", [task], cursor="", wait_s=1)
        deaf = await wire_to(servicer)
        await deaf.send(Kind.HEAD, [CallHead(method=LEASE).SerializeToString()])
        await deaf.send(Kind.MESSAGE, [WAITING.SerializeToString()])
        await deaf.send(Kind.END)
        local: Any = server._local
        await until(lambda: local._answering)
        await until(lambda: not local._callers)
        deaf.close()
        ended = generate_latest(server.registry).decode()
        for method, calls in ((WRITE, 2), (LEASE, 1)):
            assert f'meshrl_rpc_total{{method="{method}",status="CANCELLED"}} {calls}.0' in ended
        assert not [line for line in caplog.records if line.levelname == "ERROR"]


async def test_a_server_that_drains_ends_waiting_calls_and_lets_others_finish() -> None:
    async with serving() as (server, servicer, queue):
        await start_run(queue, tasks=0)
        idle, waiting, writing = [await wire_to(servicer) for _ in range(3)]
        request = WAITING.SerializeToString()
        lease = asyncio.create_task(call(waiting, LEASE, request))
        await writing.send(Kind.HEAD, [CallHead(method=WRITE).SerializeToString()])
        local: Any = server._local
        await until(lambda: len(local._answering) == 2)
        draining = asyncio.create_task(server.drain())
        assert (await lease).code == grpc.StatusCode.UNAVAILABLE.value[0]
        await writing.send(Kind.END)
        kind, data = await writing.receive()
        assert kind is Kind.END and CallEnd.FromString(bytes(data)).code
        await draining
        await until(lambda: idle.lost and waiting.lost and writing.lost)
        unreachable = LocalSocket()
        unreachable.named(servicer.local_socket)
        assert await unreachable.free_wire() is None


async def test_a_client_goes_by_grpc_past_a_socket_that_it_cannot_reach_and_by_the_next_one() -> (
    None
):
    async with serving() as (server, servicer, queue):
        await start_run(queue, tasks=2)
        async with QueueClient(server.address, retry_s=10) as client:
            right, servicer.local_socket = servicer.local_socket, "meshrl-of-another-machine"
            await write(client, await leased(client))
            assert client.local_socket.name == ""
            with pytest.raises(NotFoundError):
                await client.fetch("none", [], [])
            servicer.local_socket = right
            lease = await leased(client)
            assert client.local_socket.name == right
            await write(client, lease)
            for wire in client.local_socket._wires.copy():
                wire.close()  # as a connection that breaks: the next call makes another
            await asyncio.sleep(0)
            with pytest.raises(NotFoundError):
                await client.fetch("none", [], [])


async def test_a_call_whose_connection_breaks_is_made_again() -> None:
    async with serving() as (server, servicer, queue):
        await start_run(queue)
        async with QueueClient(server.address, retry_s=10) as client:
            client.local_socket.named(servicer.local_socket)
            lease = asyncio.create_task(leased(client, wait_s=1))
            await lease
            local: Any = server._local
            waiting = asyncio.create_task(leased(client, wait_s=20))
            await until(lambda: local._answering)
            for wire in client.local_socket._wires.copy():
                wire.close()
            await until(lambda: not local._answering)
            await until(lambda: local._answering)
            waiting.cancel()
            await until(
                lambda: not local._answering
            )  # the wait that was given up has ended there, too


async def test_a_connection_that_cannot_be_accepted_is_not_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as (_, servicer, queue):
        await start_run(queue)
        asked: list[socket.socket] = []

        def fails_once(connection: socket.socket) -> bool:
            asked.append(connection)
            if len(asked) == 1:
                connection.close()
                raise OSError("too many open files")
            return True

        monkeypatch.setattr(server, "is_own", fails_once)
        refused = await wire_to(servicer)
        with pytest.raises(WireError):
            await refused.receive()
        wire = await wire_to(servicer)
        assert (await call(wire, LEASE, WAITING.SerializeToString())).code == 0


async def test_an_answer_that_is_too_large_is_said_once_and_the_connection_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(wires._MOST_BYTES, Kind.MESSAGE, 1_000)
    async with serving() as (serves, servicer, queue), QueueClient(serves.address) as client:
        client.local_socket.named(servicer.local_socket)
        await start_run(queue, tasks=0)
        prompt = np.zeros(1_000, np.int32)
        task = Task(run="run", task_id="0", prompt_ids=prompt, group_size=2)
        await queue.admit("run", [task], cursor="", wait_s=1)
        with pytest.raises(CapacityError, match=r"message of \d+ bytes .* larger than 1000"):
            await leased(client)
        assert len(client.local_socket._idle) == 1


async def test_a_request_that_is_too_large_is_said_by_its_sender_and_not_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as (serves, servicer, queue), QueueClient(serves.address) as client:
        client.local_socket.named(servicer.local_socket)
        await start_run(queue, tasks=1)
        lease = await leased(client)
        monkeypatch.setitem(wires._MOST_BYTES, Kind.MESSAGE, 100)
        with pytest.raises(CapacityError, match=r"message of \d+ bytes .* larger than 100"):
            await write(client, lease)
        assert client.local_socket.name  # the next call goes this way again


async def test_a_client_that_is_one_too_many_goes_by_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CALLERS", 1)
    async with serving() as (serves, servicer, queue):
        await start_run(queue, tasks=2)
        first = await wire_to(servicer)
        assert (await call(first, LEASE, WAITING.SerializeToString())).code == 0
        async with QueueClient(serves.address, retry_s=10) as client:
            client.local_socket.named(servicer.local_socket)
            await write(client, await leased(client))
            assert client.local_socket.name == ""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
async def test_another_user_of_the_machine_is_not_let_in() -> None:
    async with serving() as (_, servicer, _):
        asks = (
            "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
            f"s.connect('\\0{servicer.local_socket}'); sys.exit(len(s.recv(1)))"
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", asks, stderr=subprocess.DEVNULL
        )
        assert await asyncio.wait_for(process.wait(), 20) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
async def test_a_client_of_root_shows_no_credential_to_a_service_of_another_user() -> None:
    name = f"meshrl-test-{os.getpid()}"
    listens = (
        "import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
        f"s.bind('\\0{name}'); s.listen(); print(flush=True); s.accept()"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", listens, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    local = LocalSocket()
    local.named(name)
    assert await local.free_wire() is None
    assert local.name == ""
    assert await asyncio.wait_for(process.wait(), 20) == 0


async def test_a_client_keeps_few_connections_and_makes_further_calls_by_grpc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_end, "MAX_WIRES", 3)
    async with serving() as (server, servicer, queue), QueueClient(server.address) as client:
        await start_run(queue)
        client.local_socket.named(servicer.local_socket)
        calls = [client.fetch("none", [], []) for _ in range(20)]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, NotFoundError)
        assert len(client.local_socket._wires) == 3
        assert client.local_socket.name == servicer.local_socket


async def test_a_client_that_is_not_let_in_yet_goes_by_grpc_this_time() -> None:
    name = f"meshrl-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(0)
        local = LocalSocket()
        local.named(name)
        wires = [await local.free_wire() for _ in range(3)]
        assert wires[0] is not None
        assert wires[-1] is None
        assert local.name == name
        local.close()


async def test_what_is_called_right_after_a_service_named_a_new_socket_goes_there() -> None:
    async with serving() as (server, servicer, queue), QueueClient(server.address) as client:
        await start_run(queue)
        client.local_socket.named(servicer.local_socket)
        with pytest.raises(NotFoundError):
            await client.fetch("none", [], [])
        old = client.local_socket._idle.copy()
        client.local_socket.named("meshrl-of-the-next-service")
        client.local_socket.named(servicer.local_socket)
        assert await client.local_socket.free_wire() not in [*old, None]


def test_a_message_that_is_received_is_the_memory_it_was_received_into() -> None:
    frame = bytes(100_000)
    sent = codec.Bulk(pb.WriteRequest(tokens=[1]), [frame])
    parts = sent.parts()
    assert any(part is frame for part in parts)
    data = np.frombuffer(b"".join(parts), np.uint8)
    [seen] = codec.parser(pb.WriteRequest)(data.data).frames
    assert np.shares_memory(np.frombuffer(seen, np.uint8), data)
