"""The redis store: restarts, failover, ownership, refusals; each against a real server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import trustme
from redis.asyncio import Redis

from meshrl.contract.errors import (
    CapacityError,
    CorruptError,
    InfraError,
    MeshError,
    UnavailableError,
    UserError,
)
from meshrl.launcher.address_book import free_port
from meshrl.testing.contract.queue_actors import Actors, spec, tasks
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import Operation, OwnerLostError, Table
from meshrl.transferqueue.stores import _redis_connection
from meshrl.transferqueue.stores import redis as redis_store
from meshrl.transferqueue.stores.redis import RedisStore, Timing

from ...redis_server import RedisServer, needs_redis, running

pytestmark = needs_redis


@pytest.fixture
def folder() -> Iterator[Path]:
    # A child of a killed server may still write its dump.
    with TemporaryDirectory(ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.fixture
def server(folder: Path) -> Iterator[RedisServer]:
    # A Redis that is killed forgets nothing only so: under appendfsync everysec it puts off a write while it fsyncs.
    with running(folder / "a", "--appendfsync", "always") as started:
        yield started


def config_of(*urls: str, **changes: Any) -> QueueConfig:
    fields = {"store": "redis", "durability": "none", "redis_prefix": "q", **changes}
    return QueueConfig(redis_url=",".join(urls), **fields)


def store_of(*urls: str, timing: Timing | None = None, **changes: Any) -> RedisStore:
    return redis_store.build(config_of(*urls, **changes), Path("unused"), timing=timing)


@asynccontextmanager
async def loaded(*urls: str, **changes: Any) -> AsyncIterator[RedisStore]:
    store = store_of(*urls, **changes)
    try:
        await store.load()
        yield store
    finally:
        await store.close()


def put(number: int, value: bytes = b"value") -> list[Operation]:
    key = number.to_bytes(4, "big")
    return [Operation(Table.META, key, value), Operation(Table.PAYLOAD, key, value)]


async def meta_of(store: RedisStore) -> list[int]:
    return [int.from_bytes(key, "big") for key, _ in await store.load()]


async def eventually(call: Callable[[], Any]) -> Any:
    """Repeat a call that is refused while the server is away, as every caller of the queue does."""
    while True:
        try:
            return await call()
        except MeshError:
            await asyncio.sleep(0.02)


async def room(store: RedisStore) -> None:
    """Return when there is room for a byte."""
    async with asyncio.timeout(20):
        while True:
            with suppress(CapacityError):
                return store.check_room(1)
            await asyncio.sleep(0.02)


async def test_a_commit_bigger_than_a_command_is_still_one(server: RedisServer) -> None:
    store = RedisStore(store_of(server.url)._connection, "parts", part_bytes=1000)
    await store.load()
    many = [operation for number in range(3000) for operation in put(number, bytes(100))]
    await store.apply(many)
    await store.apply([*put(1, b"new"), Operation(Table.META, bytes(4), None)])
    assert await meta_of(store) == list(range(1, 3000))
    assert await store.read([(1).to_bytes(4, "big"), bytes(4), b"none"]) == [
        b"new",
        bytes(100),
        None,
    ]
    exported = [operation async for piece in store.export() for operation in piece]
    assert len(exported) == 2999 + 3000
    await store.close()


async def test_a_commit_whose_answer_was_lost_is_done_once(server: RedisServer) -> None:
    async with loaded(server.url) as store:
        await store.apply(put(1))
        # The script ran, its answer never came: the same commit arrives again.
        store._sequence -= 1
        await store.apply([Operation(Table.META, put(1)[0].key, b"twice")])
        assert [value for _, value in await store.load()] == [b"value"]


@pytest.mark.parametrize("kind", [9, 15])
async def test_a_restart_of_redis_in_the_middle_loses_nothing(
    server: RedisServer, kind: int
) -> None:
    async with loaded(server.url) as store:
        moments = {number: asyncio.Event() for number in (50, 150, 250)}

        async def write() -> None:
            for number in range(400):
                await store.apply(put(number, bytes(5000)))
                if number in moments:
                    moments[number].set()

        writing = asyncio.create_task(write())
        for moment in moments.values():
            await moment.wait()
            await asyncio.to_thread(server.kill, kind)
            await asyncio.to_thread(server.start)
        await writing
        assert await meta_of(store) == list(range(400))
        assert store._sequence == 400


async def test_the_queue_lives_through_a_restart_of_redis(server: RedisServer) -> None:
    actors = Actors(await TransferQueue.open(store_of(server.url)))
    await actors.start(spec(max_staleness=99.0))
    await actors.feed(tasks(2))
    lease = await actors.lease()
    server.kill()
    waiting = asyncio.create_task(actors.write(lease))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await asyncio.to_thread(server.start)
    await waiting
    await actors.write(await actors.lease("reward"))
    assert len((await actors.take(0)).rows) == 4
    assert (await actors.ledger()).balanced
    await actors.queue.close()


async def test_a_redis_that_stays_away_refuses_what_was_not_acknowledged(
    server: RedisServer,
) -> None:
    store = store_of(server.url, timing=Timing(restart_s=0.2))
    actors = Actors(await TransferQueue.open(store))
    await actors.start(spec(max_staleness=99.0))
    await actors.feed(tasks(1))
    server.kill()
    # As of a queue that is away: services repeat the call, and a trainer saves before it ends.
    with pytest.raises(UnavailableError, match="cannot be reached"):
        await actors.feed(tasks(1, start=1))
    await asyncio.to_thread(server.start)
    assert await eventually(lambda: actors.feed(tasks(1, start=1))) == 1
    assert (await actors.ledger()).admitted == 4
    await actors.queue.close()


async def test_a_store_closes_although_the_library_forgets_a_cancellation(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11's `asyncio.wait_for`, by which redis-py sends, can swallow a cancellation between two masters."""
    forgetting = asyncio.Event()

    async def forgetful(client: Redis) -> None:
        forgetting.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await client.ping()

    store = store_of(server.url)
    await store.load()
    monkeypatch.setattr(_redis_connection, "_ping", forgetful)
    assert store._connection._subscriber is not None
    await store._connection._subscriber.aclose()
    await forgetting.wait()
    async with asyncio.timeout(10):
        await store.close()


async def test_a_reader_of_an_export_that_stops_holds_no_commit_up(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "PIECE_BYTES", 1)
    async with loaded(server.url) as store:
        for number in range(20):
            await store.apply(put(number))
        pieces = store.export()
        first = await anext(pieces)
        async with asyncio.timeout(60):
            await store.apply(put(20))
        rest = [operation async for piece in pieces for operation in piece]
        assert len({op.key for op in [*first, *rest]}) == 20, "what was there when it began"
        assert len([*first, *rest]) == 2 * 20


async def test_a_second_queue_is_refused_while_the_first_lives(server: RedisServer) -> None:
    first = await TransferQueue.open(store_of(server.url))
    with pytest.raises(UserError, match="already open in process"):
        await TransferQueue.open(store_of(server.url))
    async with loaded(server.url, redis_prefix="another") as other:
        assert await other.load() == []
    await first.close()
    await (await TransferQueue.open(store_of(server.url))).close()


async def test_an_owner_that_was_cut_off_is_fenced_when_it_comes_back(server: RedisServer) -> None:
    old = Actors(await TransferQueue.open(store_of(server.url)))
    await old.start(spec(max_staleness=99.0))
    await old.feed(tasks(1))
    old_store = old.queue._store
    assert isinstance(old_store, RedisStore)
    # As after a partition: its subscription is gone, and it does not know.
    subscription = old_store._connection._subscription
    assert subscription is not None
    subscription.cancel()
    await asyncio.gather(subscription, return_exceptions=True)
    new = Actors(await TransferQueue.open(store_of(server.url)))
    await new.feed(tasks(1, start=1))
    with pytest.raises(OwnerLostError, match="took it over"):
        await old.feed(tasks(1, start=2))
    with pytest.raises(OwnerLostError, match="took it over"):
        await old.ledger()
    assert "took it over" in str(await old.queue.lost())  # type: ignore[attr-defined]
    assert (await new.ledger()).admitted == 4
    await old.queue.close()
    await new.feed(tasks(1, start=3))
    assert (await new.ledger()).admitted == 6
    await new.queue.close()


@asynccontextmanager
async def replicated(folder: Path) -> AsyncIterator[tuple[RedisServer, RedisServer, Actors]]:
    """A master, its replica, and a queue there with two tasks that both have."""
    with running(folder / "a") as master, running(folder / "b") as replica:
        port = free_port("127.0.0.1")
        with master.client() as client:
            client.config_set("bind", "127.0.0.1")
            client.config_set("port", port)
        with replica.client() as client:
            client.replicaof("127.0.0.1", port)
        actors = Actors(await TransferQueue.open(store_of(master.url, replica.url)))
        await actors.start(spec(max_staleness=99.0))
        await actors.feed(tasks(2))
        with master.client() as client:
            assert client.wait(1, 5000) == 1
        yield master, replica, actors
        await actors.queue.close()


async def test_a_failover_to_a_replica_goes_on_there(folder: Path) -> None:
    async with replicated(folder) as (master, replica, actors):
        master.kill()
        with replica.client() as client:
            client.replicaof("NO", "ONE")
        await actors.work()
        await actors.train(0)
        ledger = await actors.ledger()
        assert ledger.admitted == 4 and ledger.resident["settled"] == 4


async def test_commits_that_a_new_master_lost_are_noticed_and_the_ledger_balances(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with replicated(folder) as (master, replica, actors):
        with replica.client() as client:
            # The copy stops here: what the master acknowledges from now on is lost with it.
            client.replicaof("NO", "ONE")
        await actors.feed(tasks(3, start=2))
        assert (await actors.ledger()).admitted == 10
        master.kill()
        with pytest.raises(InfraError, match="lost what came in between"):
            await actors.feed(tasks(1, start=9))
        assert "forgot 1 acknowledged commits" in caplog.text
        assert (await actors.ledger()).admitted == 4
        assert await actors.feed(tasks(3, start=2)) == 3
        assert (await actors.ledger()).admitted == 10


async def test_a_server_that_comes_back_empty_is_not_taken_for_a_fresh_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(folder / "a", "--appendonly", "no") as server:
        async with loaded(server.url, durability="none") as store:
            await store.apply(put(1))
            server.kill()
            await asyncio.to_thread(server.start)
            with pytest.raises(InfraError, match="commit 1 is stored"):
                await store.read([bytes(4)])
            with pytest.raises(InfraError, match="the server lost"):
                await store.apply(put(2))
            with pytest.raises(InfraError, match="holds nothing of this queue any more"):
                await store.load()


async def test_a_server_that_promises_less_is_refused(server: RedisServer) -> None:
    with server.client() as client:
        client.config_set("appendfsync", "everysec")
    with pytest.raises(
        UserError, match=r"durability is always and redis at .* appendfsync everysec"
    ):
        await TransferQueue.open(store_of(server.url, durability="always"))
    with server.client() as client:
        client.config_set("maxmemory", 1 << 30)
        client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(UserError, match="evicts keys"):
        await TransferQueue.open(store_of(server.url))


async def test_rows_may_not_use_the_reserve_of_maxmemory_but_may_leave(
    server: RedisServer,
) -> None:
    timing = Timing(ask_memory_every_s=0.0)
    with server.client() as client:
        client.config_set("maxmemory", 64 << 20)
    store = store_of(server.url, timing=timing, reserve_bytes=0)
    actors = Actors(await TransferQueue.open(store))
    await actors.start()
    await actors.feed(tasks(2))
    await actors.work()
    with server.client() as client:
        client.config_set("maxmemory", 1 << 20)
    await actors.publish(1)
    with pytest.raises(CapacityError, match="bytes free of Redis' maxmemory"):
        await actors.feed(tasks(2, start=2, extra_info={"filler": "x" * (1 << 20)}))
    await actors.train(0)
    await actors.commit(1)
    assert (await actors.ledger()).trained == 4
    await actors.queue.close()


async def test_room_is_asked_for_again_by_those_who_were_refused(server: RedisServer) -> None:
    timing = Timing(ask_memory_every_s=0.0)
    async with loaded(server.url, timing=timing, reserve_bytes=0) as store:
        with server.client() as client:
            client.config_set("maxmemory", 1 << 16)
            await store.apply(put(1))
            with pytest.raises(CapacityError, match="bytes free of Redis' maxmemory"):
                store.check_room(1)
            client.config_set("maxmemory", 0)
        # Nobody commits anything from here on.
        await room(store)


async def test_a_limit_that_is_kept_in_reserve_is_refused(server: RedisServer) -> None:
    with server.client() as client:
        client.config_set("maxmemory", 64 << 20)
    with pytest.raises(
        UserError, match=r"maxmemory 67108864 is not above queue\.reserve_bytes 67108864"
    ):
        await TransferQueue.open(store_of(server.url, reserve_bytes=64 << 20))


async def test_a_redis_without_a_file_is_told(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with server.client() as client:
        client.config_set("appendonly", "no")
    async with loaded(server.url):
        assert "a restart of Redis loses the whole queue" in caplog.text


LESS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no file": ("always", {"appendonly": "no"}, "has appendonly no"),
    "seldom on disk": ("always", {"appendfsync": "everysec"}, "appendfsync everysec"),
    "evicts": ("none", {"maxmemory": 1 << 30, "maxmemory-policy": "allkeys-lru"}, "evicts keys"),
}


@pytest.mark.parametrize(
    ("setting", "may_ask"),
    [*((setting, True) for setting in LESS), ("no file", False), ("evicts", False)],
)
async def test_no_rows_are_taken_while_a_setting_promises_too_little(
    server: RedisServer, setting: str, may_ask: bool
) -> None:
    """If CONFIG may not be asked, INFO shows all but `appendfsync`."""
    durability, changes, says = LESS[setting]
    timing = Timing(ask_memory_every_s=0.0)
    with server.client() as client:
        before = {key: client.config_get(key)[key] for key in changes}
        if not may_ask:
            rights = {"enabled": True, "nopass": True, "keys": ["*"], "channels": ["*"]}
            client.acl_setuser("admin", commands=["+@all"], **rights)
            client.acl_setuser("default", commands=["+@all", "-config"], **rights)
            client.execute_command("AUTH", "admin", "")
        asked = {"timing": timing, "durability": durability, "reserve_bytes": 0}
        async with loaded(server.url, **asked) as store:
            store.check_room(1)
            for key, value in changes.items():
                client.config_set(key, value)
            await store.apply(put(1))
            with pytest.raises(CapacityError, match=says):
                store.check_room(1)
            for key, value in before.items():
                client.config_set(key, value)

            await room(store)
            await store.apply(put(2))


async def test_why_waiting_names_a_redis_that_hangs(server: RedisServer) -> None:
    actors = Actors(await TransferQueue.open(store_of(server.url)))
    await actors.start()
    server.signal(signal.SIGSTOP)
    feeding = asyncio.create_task(actors.feed(tasks(1)))
    while True:
        first = (await actors.queue.why_waiting(actors.run) or [None])[0]
        if first is not None and first.who == "the queue":
            break
        await asyncio.sleep(0.1)  # a clock, not an event, makes a commit a slow one
    server.signal(signal.SIGCONT)
    assert first.what == f"queue store {server.url.replace('//', '')} q to store a commit"
    assert await feeding == 1
    assert not [each for each in await actors.queue.why_waiting(actors.run) if "store" in each.what]
    await actors.queue.close()


def test_how_long_a_redis_is_waited_for_is_a_setting() -> None:
    store = redis_store.build(config_of("redis://h", redis_wait_s=7.0), Path("unused"))
    assert store._timing.restart_s == 7.0


async def test_a_queue_ends_before_it_writes_beside_evicted_rows(server: RedisServer) -> None:
    actors = Actors(await TransferQueue.open(store_of(server.url)))
    await actors.start()
    await actors.feed(tasks(2))
    with server.client() as client:
        (sequence,) = client.hmget("meshrl:{q}:head", "sequence")
        client.delete("meshrl:{q}:payload")  # as an eviction does
        with pytest.raises(
            UnavailableError, match="payload holds 0 records of 2: Redis has evicted"
        ):
            await actors.publish(1)
        error = await asyncio.wait_for(actors.queue.lost(), 10)
        assert "restore a backup" in error.message
        assert client.hmget("meshrl:{q}:head", "sequence") == [sequence]
    await actors.queue.close()
    with pytest.raises(UserError, match="payload holds 0 records of 2"):
        await TransferQueue.open(store_of(server.url))


async def test_unknown_formats_and_foreign_keys_are_refused(server: RedisServer) -> None:
    async with loaded(server.url):
        pass
    with server.client() as client:
        client.hset("meshrl:{q}:head", "format", "99")
        client.hset("meshrl:{other}:meta", "x", "y")
    with pytest.raises(UserError, match=r"format 99, this meshrl reads format \d"):
        await TransferQueue.open(store_of(server.url))
    with pytest.raises(CorruptError, match="not a queue store"):
        await TransferQueue.open(store_of(server.url, redis_prefix="other"))


async def test_passwords_are_read_from_a_file_and_never_printed(folder: Path) -> None:
    timing = Timing(open_s=0.0)
    secret = folder / "secret"
    secret.touch(0o600)
    secret.write_text("hunter2\n")
    with running(folder / "a") as server:
        with server.client() as client:
            client.config_set("requirepass", "hunter2")
        async with loaded(server.url, redis_password_file=secret) as store:
            await store.apply(put(1))
        with pytest.raises(UserError, match="refuses us"):
            await TransferQueue.open(store_of(server.url, timing=timing))
    address = "redis://:hunter2@127.0.0.1:1/0"
    with pytest.raises(
        UnavailableError, match=r"redis://127\.0\.0\.1:1/0 cannot be reached"
    ) as error:
        await TransferQueue.open(store_of(address, timing=timing))
    assert "hunter2" not in str(error.value)
    with pytest.raises(UserError, match="redis_password_file"):
        store_of(server.url, redis_password_file=folder / "missing")
    with pytest.raises(UserError, match=r"queue\.redis_url: 'http"):
        store_of("http://somewhere")


async def test_a_connection_may_be_encrypted_and_the_server_checked(folder: Path) -> None:
    ours, theirs = trustme.CA(), trustme.CA()
    certificate = ours.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(folder / "key")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert")
    for name, authority in (("ours", ours), ("theirs", theirs)):
        authority.cert_pem.write_to_path(folder / name)
    port = free_port("127.0.0.1")
    tls = (
        "--tls-port",
        str(port),
        "--tls-auth-clients",
        "no",
        "--tls-ca-cert-file",
        folder / "ours",
    )
    files = ("--tls-cert-file", folder / "cert", "--tls-key-file", folder / "key")
    with running(folder / "a", *map(str, (*tls, *files))):
        address = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={folder}/"
        async with loaded(address + "ours") as store:
            await store.apply(put(1))
            assert await meta_of(store) == [1]
        with pytest.raises(UnavailableError, match="certificate verify failed"):
            await TransferQueue.open(store_of(address + "theirs", timing=Timing(open_s=0.0)))
