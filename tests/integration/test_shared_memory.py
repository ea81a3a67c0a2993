"""Long frames in memory that the queue shares: what is read never changes, what is dropped comes back."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import os
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest
import uvloop

from meshrl.contract import codec
from meshrl.contract.errors import CorruptError, MeshError, UnauthenticatedError, WaitTimeoutError
from meshrl.contract.frames import checksum_of
from meshrl.contract.types import (
    REFERENCE_STAGE,
    ROLLOUT_STAGE,
    GroupRows,
    PayloadGroup,
)
from meshrl.rpc import credentials
from meshrl.rpc.clients import QueueClient
from meshrl.rpc.credentials import Credential, MeshRole, ensure_credentials
from meshrl.rpc.local_socket import mapped_memory
from meshrl.rpc.local_socket.shared_memory import (
    KEY_BYTES,
    LEAST_BYTES,
    REGION_BYTES,
    Caller,
    Grant,
    Word,
    address_of_link,
)
from meshrl.rpc.local_socket.wire import Kind, Wire, WireError
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import build

from ..waiting import until
from .shared_memory_mesh import LONG, MEMORY, NOW, REGION, SPEC, Mesh, is_shared, raw, sharing
from .test_local_socket import serving


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[Kind]:
    """Counts the messages of each kind that any wire sends."""
    counts: Counter[Kind] = Counter()
    send = Wire.send

    async def counting(wire: Wire, kind: Kind, *parts: Any) -> None:
        counts[kind] += 1
        await send(wire, kind, *parts)

    monkeypatch.setattr(Wire, "send", counting)
    return counts


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_long_frames_are_written_leased_and_fetched_by_reference(
    run: Any, sent: Counter[Kind]
) -> None:
    run(trip(sent))


async def trip(sent: Counter[Kind]) -> None:
    async with serving(shared_bytes=MEMORY) as (server, servicer, queue):
        mesh = Mesh(server, servicer, queue)
        await mesh.start(replace(SPEC, stages=(ROLLOUT_STAGE, REFERENCE_STAGE)))
        async with mesh.client() as writer, mesh.client() as reader:
            while not (sent[Kind.REFERRING]):
                await mesh.write(writer)
            task = await mesh.write(writer)
            for _ in range(2):  # until the reader has the memory
                await mesh.fetch(reader, task)
            before = sent[Kind.REFERRING]
            frame = await mesh.fetch(reader, task)
            assert sent[Kind.REFERRING] == before + 1
            assert is_shared(frame) and frame.readonly and frame == mesh.written[task]
            await mesh.fetch(writer, task)  # its memory is the same
            before = sent[Kind.REFERRING]
            lease = await reader.lease(["run"], "reference", worker="r", limit=99, wait_s=5)
            assert sent[Kind.REFERRING] > before
            for row in lease.rows:
                tokens = row.columns["tokens"]
                assert tokens.tobytes() in mesh.written[row.uid.task]
                assert len(tokens) == LONG and not tokens.flags.writeable


async def test_readers_of_some_columns_see_no_others_wherever_they_are() -> None:
    async with sharing() as mesh, mesh.client() as writer, mesh.client() as reader:
        for client in (writer, reader):
            await mesh.warm(client)
        tasks = [await mesh.write(writer) for _ in range(2)]
        afar = QueueClient(mesh.server.address)
        async with afar:
            [near_group], [far_group] = [
                await tokens_of(client, tasks[:1]) for client in (reader, afar)
            ]
            [near], [far] = near_group.parts, far_group.parts
            assert is_shared(memoryview(near.frame)) and near.frame == mesh.written[tasks[0]]
            assert len(far.frame) < len(near.frame) / 2
            for group in (near_group, far_group):
                assert list(group.columns()[0]) == ["tokens"]
                assert group.column("tokens")[0].tobytes() in mesh.written[tasks[0]]

            # Somebody who maps the memory writes over a frame: whoever reads it hears of it, and others do not.
            lies: Any = memoryview((await mesh.fetch(reader, tasks[1])).obj)
            at = lies.obj.at + 5_000
            mesh.memory._mapping.everything[at] ^= 1
            for client in (reader, afar):
                good, bad = await tokens_of(client, tasks)
                assert list(good.columns()[0]) == ["tokens"]
                with pytest.raises(CorruptError):
                    bad.columns()
            mesh.memory._mapping.everything[at] ^= 1


async def tokens_of(client: QueueClient, tasks: Sequence[str]) -> Sequence[PayloadGroup]:
    asked = [GroupRows(task=task, indices=(0,), attempts=(0,)) for task in tasks]
    return await client.fetch_packed("run", asked, ["tokens"])


async def test_rows_are_packed_where_they_stay() -> None:
    """Also those that are never written: what they lie in is free again."""
    async with sharing() as mesh, mesh.client() as client:
        room = client.room
        assert room is not None and room(REGION_BYTES) is None
        await mesh.warm(client)
        copied = client.local_socket.placed
        for number in range(2 * MEMORY // REGION_BYTES):
            group = await mesh.group(LONG, room)
            assert is_shared(cast(Any, group.frame)) and copied([group.frame]) == [group.frame]
            if number % 2:
                mesh.written[group.task] = bytes(group.frame)
                await client.write_packed("run", "rollout", [group])
                assert await mesh.fetch(client, group.task) == mesh.written[group.task]
                await mesh.drop_all()
            else:
                await mesh.queue.release("run", "rollout", {group.uids("run")[0]: group.token})
            del group
        assert room(LEAST_BYTES - 1) is room(REGION_BYTES + 1) is None
        await mesh.freed()


async def test_compressed_frames_go_as_bytes() -> None:
    async with sharing() as mesh, mesh.client() as writer:
        client = QueueClient(mesh.server.address, compression="zstd")
        client.local_socket.named(mesh.servicer.local_socket)
        async with client:
            await mesh.warm(writer)
            for own in (writer, client, client):
                task = await mesh.write(own)
                for reader in (client, client, writer):
                    assert await mesh.fetch(reader, task) == mesh.written[task]


async def test_short_frames_go_as_bytes(sent: Counter[Kind]) -> None:
    async with sharing() as mesh, mesh.client() as client:
        await mesh.warm(client)
        before = sent[Kind.REFERRING]
        task = await mesh.write(client, LEAST_BYTES // 12)
        frame = await mesh.fetch(client, task)
        assert len(frame) < LEAST_BYTES and frame == mesh.written[task]
        assert sent[Kind.REFERRING] == before


async def test_what_is_held_stays_as_it_is_while_writers_write_many_times_the_memory() -> None:
    async with sharing(2 * MEMORY) as mesh:
        held: list[tuple[memoryview, bytes]] = []
        async with mesh.client() as writer, mesh.client() as other:
            async with mesh.client() as reader:
                for client in (writer, other, reader):
                    await mesh.warm(client)
                for _ in range(2):
                    task = await mesh.write(writer)
                    held.append((await mesh.fetch(reader, task), mesh.written[task]))
                await asyncio.to_thread(lambda: asyncio.run(fetch_elsewhere(mesh, task, held)))
            assert all(is_shared(frame) for frame, _ in held)
            written: Counter[bool] = Counter()
            for number in range(5 * MEMORY // REGION_BYTES):
                for client in (writer, other):
                    task = await mesh.write(client, REGION if number % 2 else LONG)
                    written[is_shared(await mesh.fetch(client, task))] += 1
                    await mesh.drop_all()
                for frame, expected in held:
                    assert bytes(frame) == expected
            assert written[True] > 2 * MEMORY // REGION_BYTES
            assert len(held) == 3
            await until(lambda: sum(len(each._answers) for each in mesh.memory.links) == 3)
            del frame
            held.clear()
            await mesh.freed()


async def fetch_elsewhere(mesh: Mesh, task: str, held: list[tuple[memoryview, bytes]]) -> None:
    """On an event loop that ends while the frame is held."""
    client = mesh.client()
    while True:
        asked = [GroupRows(task=task, indices=(0,), attempts=(0,))]
        [group] = await client.fetch_packed("run", asked, ROLLOUT_STAGE.writes)
        frame = memoryview(group.parts[0].frame)
        if is_shared(frame):
            break
    held.append((frame, mesh.written[task]))
    await client.close()


async def test_frames_that_are_dropped_are_freed_one_answer_at_a_time_without_the_collector() -> (
    None
):
    async with sharing() as mesh, mesh.client() as client:
        await mesh.warm(client)
        tasks = [await mesh.write(client) for _ in range(2)]
        first, second = [await mesh.fetch(client, task) for task in tasks]
        [caller] = mesh.memory.links
        gc.collect()
        gc.disable()
        try:
            await until(lambda: len(caller._answers) == 2)
            del first
            await until(lambda: len(caller._answers) == 1)
            assert second == mesh.written[tasks[1]]
            del second
            await until(lambda: not caller._answers)
        finally:
            gc.enable()


@pytest.mark.parametrize("confirmed", [False, True])
async def test_an_answer_is_held_from_its_confirmation_on_even_if_its_connection_ends(
    confirmed: bool,
) -> None:
    async with raw() as (caller, task, _):
        wire = await caller.wire()
        await caller.ask(wire, task)
        kind, message = await wire.receive()
        assert kind is Kind.REFERRING
        [number] = struct.unpack_from("<Q", message)
        held = caller.caller
        assert number in held._answers
        if confirmed:
            caller.say(Word.RECEIVED, number)
        else:
            caller.say(Word.DONE, number)  # counts for nothing: not all of it has come
        wire.close()
        local: Any = caller.mesh.server._local
        await until(lambda: len(local._callers) == 2)
        assert (number in held._answers) == confirmed
        if confirmed:
            caller.say(Word.DONE, number)
        await until(lambda: number not in held._answers)


async def test_calls_that_are_cancelled_anywhere_hold_nothing() -> None:
    async with sharing() as mesh, mesh.client() as client, mesh.client() as writer:
        for each in (client, writer):
            await mesh.warm(each)
        task = await mesh.write(writer)
        for turns in range(40):
            fetching = asyncio.create_task(mesh.fetch(client, task))
            leasing = asyncio.create_task(
                client.lease(["run"], "rollout", worker="w", limit=1, version=NOW, wait_s=5)
            )
            for _ in range(turns):
                await asyncio.sleep(0)
            for running in (fetching, leasing):
                running.cancel()
            await asyncio.gather(fetching, leasing, return_exceptions=True)
            del fetching, leasing, running
        frame = await mesh.fetch(client, task)
        assert frame == mesh.written[task]
        del frame
        await mesh.drop_all()
        await mesh.freed()


async def test_frames_go_as_bytes_where_no_region_is_left(sent: Counter[Kind]) -> None:
    async with sharing() as mesh, mesh.client() as client:
        await mesh.warm(client)
        taken = []
        while region := mesh.memory.grant():
            taken.append(region)
        frames = [(await mesh.write(client, REGION)) for _ in range(4)]
        before = sent[Kind.REFERRING]
        task = await mesh.write(client, REGION)
        assert sent[Kind.REFERRING] == before
        for each in (*frames, task):
            assert await mesh.fetch(client, each) == mesh.written[each]
        del region
        taken.clear()
        await mesh.drop_all()
        for _ in range(3):
            await mesh.write(client, REGION)
        assert sent[Kind.REFERRING] > before


async def test_a_machine_without_memory_for_more_regions_sends_frames_as_bytes(
    monkeypatch: pytest.MonkeyPatch, sent: Counter[Kind]
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with sharing() as mesh, mesh.client() as client:
        monkeypatch.setattr(os, "posix_fallocate", full)
        for _ in range(4):
            task = await mesh.write(client)
            assert await mesh.fetch(client, task) == mesh.written[task]
        assert sent[Kind.REFERRING] == 0
        assert mesh.memory.used_bytes == 0
        monkeypatch.undo()
        await mesh.warm(client)


def references(*found: tuple[int, ...], answer: int = 0, count: int = -1) -> bytes:
    head = struct.pack("<QI", answer, len(found) if count < 0 else count)
    return head + b"".join(struct.pack("<IIQQQ", *each) for each in found)


def good(given: Grant, frame: bytes, **changes: int) -> tuple[int, ...]:
    fields = {
        "number": 0,
        "size": len(frame),
        "at": given.region * REGION_BYTES,
        "checksum": checksum_of(frame),
        "grant": given.number,
    }
    return tuple({**fields, **changes}.values())


BAD: dict[str, Callable[[Grant, bytes, bytes], bytes]] = {
    "another grant": lambda grant, frame, message: (
        references(good(grant, frame, grant=grant.number + 1)) + message
    ),
    "another region": lambda grant, frame, message: (
        references(good(grant, frame, at=(grant.region + 1) * REGION_BYTES)) + message
    ),
    "beyond the memory": lambda grant, frame, message: (
        references(good(grant, frame, at=1 << 60)) + message
    ),
    "beyond the region": lambda grant, frame, message: (
        references(good(grant, frame, at=(grant.region + 1) * REGION_BYTES - 10)) + message
    ),
    "larger than any": lambda grant, frame, message: (
        references(good(grant, frame, size=(1 << 32) - 1)) + message
    ),
    "short": lambda grant, frame, message: references(good(grant, frame, size=8)) + message,
    "of nothing": lambda grant, frame, message: references(good(grant, frame, size=0)) + message,
    "another checksum": lambda grant, frame, message: (
        references(good(grant, frame, checksum=checksum_of(frame) ^ 1)) + message
    ),
    "none": lambda grant, frame, message: references() + message,
    "too many": lambda grant, frame, message: references(*[good(grant, frame)] * 5_000) + message,
    "fewer than announced": lambda grant, frame, message: references(good(grant, frame), count=2),
    "truncated in a reference": lambda grant, frame, message: references(good(grant, frame))[:-3],
    "truncated in the head": lambda grant, frame, message: references(good(grant, frame))[:7],
    "empty": lambda grant, frame, message: b"",
    "a number that does not follow": lambda grant, frame, message: (
        references(good(grant, frame, number=7)) + message
    ),
}


@pytest.mark.parametrize("kind", BAD)
async def test_who_refers_to_what_does_not_lie_there_is_cut_off_and_others_are_not(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with raw() as (caller, task, client):
        mesh = caller.mesh
        [grant] = await caller.granted(1)
        group = await mesh.group()
        at = grant.region * REGION_BYTES
        mapping: Any = caller.memory._written
        mapping.everything[at : at + len(group.frame)] = np.frombuffer(group.frame, np.uint8)
        call = codec.WriteCall(run="run", stage="rollout", groups=(group,))
        [bulk] = codec.encode_write(call)
        message = b"".join(bulk.parts({0}))
        wire = await caller.wire()
        await caller.begin(wire, "Write")
        await wire.send(Kind.REFERRING, [BAD[kind](grant, group.frame, message)])
        await wire.send(Kind.END)
        with pytest.raises(WireError):
            await wire.receive()
        assert not [line for line in caplog.records if line.levelname == "ERROR"]
        assert await mesh.fetch(client, task) == mesh.written[task]
        wire = await caller.wire()
        await caller.begin(wire, "Write")
        await wire.send(Kind.REFERRING, [references(good(grant, group.frame)) + message])
        await wire.send(Kind.END)
        assert (await wire.receive())[0] is Kind.MESSAGE
        assert await mesh.fetch(client, group.task) == group.frame


@pytest.mark.parametrize("way", ["of a write", "of an answer"])
async def test_a_client_whose_references_are_refused_goes_on_by_bytes(
    way: str, monkeypatch: pytest.MonkeyPatch, sent: Counter[Kind]
) -> None:
    async with sharing() as mesh, mesh.client() as client:
        await mesh.warm(client)
        task = await mesh.write(client)
        with monkeypatch.context() as patched:
            kind: Any = Caller if way == "of a write" else mapped_memory.Answer
            name = "adopt" if way == "of a write" else "frame"

            def refuse(*_: Any) -> None:
                raise WireError("a reference that is refused")

            patched.setattr(kind, name, refuse)
            before = sent[Kind.REFERRING]
            other = await mesh.write(client)
            frame = await mesh.fetch(client, task)
            assert sent[Kind.REFERRING] > before
        assert client.local_socket.name == mesh.servicer.local_socket
        assert frame == mesh.written[task]
        assert await mesh.fetch(client, other) == mesh.written[other]
        del frame
        await mesh.drop_all()
        await mesh.freed()


async def test_only_a_caller_with_a_call_that_was_let_in_gets_the_memory(tmp_path: Path) -> None:
    ensure_credentials(tmp_path)
    verifiers = credentials.verifiers_file(tmp_path)
    async with sharing(verifiers=verifiers) as mesh:
        lease = ["run"], "rollout"
        stranger = QueueClient(mesh.server.address, credential=Credential("wrong"))
        of_rollout = Credential(credentials.file_of_role(tmp_path, MeshRole.ROLLOUT))
        async with stranger, QueueClient(mesh.server.address, credential=of_rollout) as own:
            group = await mesh.group()
            for client in (stranger, own):
                client.local_socket.named(mesh.servicer.local_socket)
            for _ in range(3):
                with pytest.raises(UnauthenticatedError):
                    await stranger.write_packed("run", "rollout", [group])
                with pytest.raises(UnauthenticatedError):
                    await stranger.lease(*lease, worker="w", limit=1, version=NOW, wait_s=1)
            link = stranger.local_socket._memory
            assert link is not None and len(mesh.memory.links) == 1
            while (memory := own.local_socket._memory) is None or memory._read is None:
                await own.write_packed("run", "rollout", [group])
            with pytest.raises(UnauthenticatedError):
                await stranger.write_packed("run", "rollout", [group])
            link.receive()
            assert link._read is None


WORDS = [
    *(0, 1 << 63, 5 << 56, 255 << 56 | 7, (1 << 64) - 1),
    *(Word.WANT << 56 | 1 << 55, Word.WANT << 56 | 2, Word.WANT << 56),
    *(Word.GIVE_BACK << 56 | number for number in (0, 1, 99, 1 << 50)),
    *(Word.RECEIVED << 56 | number for number in (0, 1, 2, 1 << 50)),
    *(Word.DONE << 56 | number for number in (0, 1, 2, 1 << 50)),
]


def a_link(mesh: Mesh) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(address_of_link(mesh.servicer.local_socket))
    return link


async def test_nonsense_on_a_link_harms_nobody() -> None:
    async with raw() as (caller, task, client):
        mesh = caller.mesh
        frame = await mesh.fetch(client, task)
        memory = client.local_socket._memory
        assert memory is not None
        links = len(mesh.memory.links)
        for key in (b"", b"\0", bytes(KEY_BYTES - 1), bytes(KEY_BYTES + 1), memory.key):
            with a_link(mesh) as link:
                link.send(key)
                link.settimeout(10)
                assert await asyncio.to_thread(link.recv, 1) == b""
        with a_link(mesh), a_link(mesh) as silent:
            await until(lambda: len(mesh.memory.links) == links + 2)
            silent.send(bytes(KEY_BYTES))
            silent.send(b"\1\2\3")
            silent.send(bytes(1 << 16))
            silent.send(struct.pack("<Q", Word.WANT << 56 | 1 << 55))
        await until(lambda: len(mesh.memory.links) == links)
        some = random.Random(1)
        with suppress(BlockingIOError):
            for _ in range(200):
                caller.memory._link.socket.send(
                    struct.pack("<7Q", *some.choices([*WORDS, some.getrandbits(64)], k=7))
                )
        with suppress(BlockingIOError):
            caller.memory._link.socket.send(struct.pack("<Q", Word.WANT << 56 | 1 << 55) + b"rest")
        await asyncio.sleep(0.05)
        assert len(caller.caller._granted) <= MEMORY // REGION_BYTES // 4
        assert frame == mesh.written[task]
        other = await mesh.write(client)
        assert await mesh.fetch(client, other) == mesh.written[other]


async def test_a_caller_has_at_most_a_quarter_of_the_regions_and_its_end_gives_them_back() -> None:
    async with raw() as (caller, _, _):
        mesh = caller.mesh
        before = mesh.memory.used_bytes
        assert len(await caller.granted(1 << 55)) == 2
        assert await caller.granted(1) == []
        assert mesh.memory.used_bytes == before + 2 * REGION_BYTES
        caller.local.close()
        await until(lambda: mesh.memory.used_bytes == before)


async def test_no_caller_can_cut_the_memory_short() -> None:
    async with raw() as (caller, _, _):
        file = caller.mesh.memory._file
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
        assert seals & fcntl.F_SEAL_SHRINK and seals & fcntl.F_SEAL_GROW
        for size in (0, MEMORY - 4096, MEMORY + 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(file, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


async def test_a_service_that_starts_anew_gets_what_was_placed_for_the_other_and_old_views_stay() -> (
    None
):
    queue = await TransferQueue.open(build(QueueConfig(store="memory"), Path()))
    servicer = QueueServicer(queue)
    settings = ServerSettings(metrics_port=None, drain_grace_s=1, shared_bytes=MEMORY)
    async with GrpcServer(settings, [servicer]) as server:
        mesh = Mesh(server, servicer, queue)
        await mesh.start()
        client = mesh.client()
        await mesh.warm(client)
        task = await mesh.write(client)
        view, expected = await mesh.fetch(client, task), mesh.written[task]
        group = await mesh.group()
        messages = client._bulk(codec.WriteCall(run="run", stage="rollout", groups=(group,)))
        assert is_shared(view) and is_shared(memoryview(messages[0].frames[0]))
        port = int(server.address.rpartition(":")[2])
    writing = asyncio.create_task(
        client._connection.call_with_stream(client._write, messages, lambda answer: answer)
    )
    settings = settings.model_copy(update={"port": port})
    async with GrpcServer(settings, [servicer]) as server:
        await writing
        mesh.server = server
        mesh.written[group.task] = group.frame
        assert await mesh.fetch(client, group.task) == group.frame
        assert client.local_socket.name == servicer.local_socket
        del messages
        await mesh.warm(client)
        for _ in range(8):
            await mesh.write(client, REGION)
            await mesh.drop_all()
        assert bytes(view) == expected
        await client.close()
    await queue.close()


async def test_nothing_is_shared_where_the_recipe_says_none(sent: Counter[Kind]) -> None:
    async with sharing(0) as mesh, mesh.client() as client:
        for _ in range(4):
            task = await mesh.write(client)
            assert await mesh.fetch(client, task) == mesh.written[task]
        local: Any = mesh.server._local
        assert local._memory is None and client.local_socket._memory is None
        assert sent[Kind.MESSAGE] and not sent[Kind.REFERRING]


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_several_clients_do_each_view_is_what_was_written(seed: int) -> None:
    some = random.Random(seed)
    async with sharing(some.choice((16 << 20, 32 << 20))) as mesh:
        clients = [mesh.client() for _ in range(4)]
        held: list[tuple[memoryview, bytes]] = []
        shared: Counter[bool] = Counter()
        running: set[asyncio.Task[Any]] = set()

        async def write() -> None:
            if len(mesh.written) < 12:
                await mesh.write(some.choice(clients), some.choice((100, LONG, LONG, REGION)))

        async def fetch() -> None:
            if mesh.written and len(held) < 12:
                task = some.choice(list(mesh.written))
                expected = mesh.written[task]
                with suppress(MeshError):  # it was dropped meanwhile
                    frame = await mesh.fetch(some.choice(clients), task)
                    shared[is_shared(frame)] += 1
                    held.append((frame, expected))

        async def leave() -> None:
            at = some.randrange(len(clients))
            gone, clients[at] = clients[at], mesh.client()
            await gone.close()

        def check() -> None:
            for frame, expected in held:
                assert bytes(frame) == expected

        for _ in range(150):
            act = some.choices(
                ("write", "fetch", "forget", "drop", "cancel", "leave", "rest"),
                (30, 30, 15, 12, 4, 1, 8),
            )[0]
            if act in ("write", "fetch"):
                running.add(asyncio.create_task(write() if act == "write" else fetch()))
            elif act == "forget" and held:
                del held[some.randrange(len(held))]
            elif act == "drop" and len(mesh.written) > 1:
                with suppress(WaitTimeoutError):  # none is complete
                    await mesh.drop(0)
            elif act == "cancel" and running:
                some.choice(sorted(running, key=id)).cancel()
            elif act == "leave":
                await leave()
            for _ in range(some.randrange(6)):
                await asyncio.sleep(0)
            if some.random() < 0.3:
                await asyncio.sleep(0.002)
            done = {task for task in running if task.done()}
            for task in done:
                if not task.cancelled() and (error := task.exception()) is not None:
                    assert isinstance(error, (MeshError, grpc.aio.UsageError)), error  # it has left
            running -= done
            if done:
                check()
            del done
        await asyncio.gather(*running, return_exceptions=True)
        running.clear()
        check()
        assert shared[True] > 5
        held.clear()
        for client in clients:
            await client.close()
        with suppress(WaitTimeoutError):  # some were never written
            while mesh.written:
                await mesh.drop(0)
        await mesh.freed()
