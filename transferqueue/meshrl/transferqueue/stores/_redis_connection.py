"""The connection to Redis: finds the master among the addresses, reconnects after a restart or a failover.

    call ──▶ work(client) ──▶ answer
     ▲           │ connection lost, loading, not the master (any more)
     └── pause ──┘ look for the master again, until the timeout

consumes: addresses. waits for: a master that answers. unblocked by: its answer, or the timeout.

Beside it are the scripts that the redis store runs inside Redis: each is one atomic step that first checks the
fencing token, and runs completely or not at all, in memory and in the append-only file alike. It may exceed
`maxmemory` (allow-oom): rows must be able to leave when Redis is full; calls that let rows in ask `check_room` first.

    head      hash: format, owner, generation (fencing token), name, sequence (number of the last commit), and for the
              commit `counted` how many records `meta` and `payload` had after it
    meta      hash: the table META
    payload   hash: the table PAYLOAD
    staged:*  lists: puts of a commit that is too big for one command, until the commit takes them in
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ConnectionError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from meshrl.common.sockets import has_secret, keep_secret
from meshrl.contract.errors import (
    CapacityError,
    InfraError,
    MeshError,
    UnavailableError,
    UserError,
)
from meshrl.transferqueue.store import Operation, Table

log = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_S: Final = 30.0
"""A server that is silent for longer than this in the middle of a command counts as gone."""
LONGEST_PAUSE_S: Final = 1.0
CANCEL_AGAIN_S: Final = 0.1
_RANK: Final = {"none": 0, "no": 0, "everysec": 1, "always": 2}
"""Compares `queue.durability` with Redis' `appendfsync`."""
_TRY_AGAIN = (ConnectionError, TimeoutError, BusyLoadingError, ReadOnlyError, MasterDownError)
_REFUSED = (AuthenticationError, AuthorizationError, NoPermissionError)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one queue; the braces keep them on one slot."""

    prefix: str

    def __getitem__(self, name: str) -> str:
        return f"meshrl:{{{self.prefix}}}:{name}"

    def tables(self) -> list[str]:
        """META and PAYLOAD, in the order that the scripts expect."""
        return [self[table] for table in Table]

    def staged(self) -> list[str]:
        """The staged parts of META and PAYLOAD, in the same order."""
        return [self[f"staged:{table}"] for table in Table]


class RedisConnection:
    """Clients of the one of `urls` that is the master now."""

    def __init__(self, urls: Sequence[str], password: str | None = None) -> None:
        self._urls = tuple(urls)
        self._password = password
        for url in self._urls:
            # Nothing connects yet: this raises for a malformed URL before anything else happens.
            self._client_of(url)
        self._url = self._urls[0]
        self._client: Redis | None = None
        self._finding = asyncio.Lock()
        self._subscriber: Redis | None = None
        self._subscription: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Every address, without passwords."""
        return ", ".join(map(bare, self._urls))

    async def call(self, work: Callable[[Redis], Awaitable[T]], timeout_s: float) -> T:
        """Return what `work` returns. It must be repeatable, as an answer may be lost.

        Raises:
            UserError: wrong password, or not allowed. CapacityError: Redis is full.
            UnavailableError: no master answered within `timeout_s`. InfraError: Redis refused the command.
        """
        clock = asyncio.get_running_loop().time
        give_up_at, pause_s = clock() + timeout_s, 0.02
        while True:
            client: Redis | None = None
            try:
                client = await self._master()
                return await work(client)
            except (*_REFUSED, *_TRY_AGAIN) as error:
                if _refused(error):
                    raise UserError(f"redis at {self.name} refuses us: {error}") from error
                await self._drop(client)
                if clock() + pause_s > give_up_at:
                    raise UnavailableError(
                        f"redis at {self.name} cannot be reached: {error}"
                    ) from error
                log.info("redis at %s: %s; trying again", self.name, error)
            except RedisError as error:
                raise self._named(error) from error
            # Jitter, so that several queues do not come back at the same time.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)

    async def subscribe(self, channel: str, timeout_s: float) -> None:
        """Stay subscribed to `channel` from now on, also after a reconnect: it shows that this owner lives."""
        if self._subscription is not None:
            return
        subscribed = asyncio.Event()
        self._subscription = asyncio.create_task(
            self._stay_subscribed(channel, subscribed, timeout_s), name="queue-redis-hold"
        )
        waiting = asyncio.create_task(subscribed.wait())
        await asyncio.wait({waiting, self._subscription}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not subscribed.is_set():
            task, self._subscription = self._subscription, None
            await task

    async def close(self) -> None:
        """Disconnect; idempotent."""
        while self._subscription is not None:
            # More than once: redis-py sends under `wait_for`, which up to Python 3.11 forgets a cancellation that
            # arrives together with the answer.
            self._subscription.cancel()
            ended, _ = await asyncio.wait({self._subscription}, timeout=CANCEL_AGAIN_S)
            if ended:
                await asyncio.gather(*ended, return_exceptions=True)
                self._subscription = None
        await self._drop(self._client)

    async def _stay_subscribed(
        self, channel: str, subscribed: asyncio.Event, timeout_s: float
    ) -> None:
        """Stay subscribed until cancelled. waits for: a lost connection. produces: a subscription seen by queues."""
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + timeout_s
        while True:
            await self.call(_ping, float("inf") if subscribed.is_set() else timeout_s)
            subscriber = self._subscriber = self._client_of(self._url, answer_s=None)
            try:
                async with subscriber.pubsub() as pubsub:
                    await pubsub.subscribe(channel)
                    async for message in pubsub.listen():
                        if message["type"] == "subscribe":
                            subscribed.set()
            except (RedisError, OSError) as error:
                patient = isinstance(error, _TRY_AGAIN) and clock() < give_up_at
                if not subscribed.is_set() and not patient:
                    raise self._named(error) from error
                log.info("redis at %s: the owner's subscription was lost (%s)", self.name, error)
            finally:
                await subscriber.aclose()

    async def _master(self) -> Redis:
        if self._client is not None:
            return self._client
        async with self._finding:
            if self._client is None:
                self._client = await self._find()
            return self._client

    async def _find(self) -> Redis:
        reasons: list[str] = []
        for url in self._urls:
            # Whatever ends the question, a cancellation too, hangs up; only the master's client stays.
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(aclosing(self._client_of(url)))
                try:
                    (role, *_) = await client.execute_command("ROLE")  # type: ignore[no-untyped-call]
                except _TRY_AGAIN as error:
                    if _refused(error):
                        raise
                    reasons.append(str(error))
                    continue
                if role in (b"master", "master"):
                    self._url = url
                    stack.pop_all()
                    return client
                reasons.append(f"{bare(url)} is a replica")
        raise ConnectionError("; ".join(reasons))

    async def _drop(self, client: Redis | None) -> None:
        """Forget a client that failed, and with it the subscription, which may be at an old master."""
        if client is None or client is not self._client:
            return
        self._client = None
        await client.aclose()
        if self._subscriber is not None:
            await self._subscriber.aclose()

    def _client_of(self, url: str, answer_s: float | None = ANSWER_S) -> Redis:
        given: dict[str, Any] = {} if self._password is None else {"password": self._password}
        if not url.startswith("unix:"):
            given["socket_keepalive"] = True
        if given.get("password") or has_secret(url):
            keep_secret(url, "the password of queue.redis_url")
        try:
            client = Redis.from_url(
                url,
                **given,
                protocol=2,
                socket_timeout=answer_s,
                socket_connect_timeout=5.0,
                retry=Retry(NoBackoff(), 0),
            )
            # Unknown options of the URL are found only here.
            client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
            return client
        except (ValueError, TypeError) as error:
            raise UserError(
                f"queue.redis_url: {bare(url)!r}: {error}; want redis://host:port/0, rediss://… (TLS)"
                " or unix:///path/to.sock, several separated by commas"
            ) from error

    def _named(self, error: Exception) -> MeshError:
        if isinstance(error, OutOfMemoryError):
            return CapacityError(f"redis at {self.name} is full: {error}", free=0)
        return InfraError(f"redis at {self.name}: {error}")


def _refused(error: Exception) -> bool:
    """A server that asks for a password while the connection is made is a broken connection to redis-py."""
    return isinstance(error, _REFUSED) or isinstance(error.__cause__, _REFUSED)


async def _ping(client: Redis) -> None:
    await client.ping()


def bare(url: str) -> str:
    """The URL without user and password, for people to read."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


def in_parts(operations: Sequence[Operation], table: Table, limit: int) -> Iterator[list[bytes]]:
    """Keys and values put into `table`, in lists of up to `limit` bytes; the last may be empty."""
    part: list[bytes] = []
    size = 0
    for operation in operations:
        if operation.table is not table or operation.value is None:
            continue
        if part and size + len(operation.value) > limit:
            yield part
            part, size = [], 0
        part += [operation.key, operation.value]
        size += len(operation.key) + len(operation.value)
    yield part


async def settings_of(client: Redis) -> dict[str, str]:
    """The settings on which its promises depend; without `appendfsync` where only INFO may be asked."""
    try:
        found = await client.config_get("append*") | await client.config_get("maxmemory*")
    except ResponseError:
        info = await client.info("memory") | await client.info("persistence")
        found = {
            "appendonly": "yes" if info.get("aof_enabled") else "no",
            "maxmemory": info.get("maxmemory", 0),
            "maxmemory-policy": info.get("maxmemory_policy", ""),
        }
    return {str(key): str(value) for key, value in found.items()}


def broken_promise(name: str, found: Mapping[str, str], durability: str) -> str:
    """The promise that these settings of the Redis `name` break, and what to set; empty: none."""
    fsync = found.get("appendfsync", durability)
    has = fsync if found["appendonly"] == "yes" else "no"
    if _RANK[durability] > _RANK[has]:
        return (
            f"queue.durability is {durability} and redis at {name} has appendonly {found['appendonly']},"
            f" appendfsync {fsync}: CONFIG SET it to appendonly yes, appendfsync {durability}, or set"
            " queue.durability=none"
        )
    if int(found["maxmemory"]) and found["maxmemory-policy"].startswith("allkeys"):
        return (
            f"redis at {name} evicts keys when it is full (maxmemory-policy {found['maxmemory-policy']}): rows"
            " would be lost; want noeviction"
        )
    return ""


CLAIM: Final = """#!lua flags=allow-oom
-- KEYS head meta payload staged:meta staged:payload; ARGV format owner name generation channels
local head = redis.call('HMGET', KEYS[1], 'format', 'owner', 'generation', 'name', 'sequence')
if not head[1] then
  if redis.call('EXISTS', KEYS[1], KEYS[2], KEYS[3]) > 0 then return {'foreign'} end
  if ARGV[4] ~= '0' then return {'empty'} end
  head = {ARGV[1], '', '0', '', '0'}
end
if head[1] ~= ARGV[1] then return {'format', head[1]} end
local generation, ours = tonumber(head[3]), tonumber(ARGV[4])
if head[2] ~= ARGV[2] then
  if ours > 0 and generation >= ours then return {'fenced', head[4]} end
  if head[2] ~= '' and redis.call('PUBSUB', 'NUMSUB', ARGV[5] .. head[2])[2] > 0 then
    return {'owned', head[4]}
  end
end
generation = string.format('%d', math.max(generation, ours) + 1)
redis.call('HSET', KEYS[1], 'format', head[1], 'owner', ARGV[2], 'generation', generation,
  'name', ARGV[3], 'sequence', head[5])
redis.call('DEL', KEYS[4], KEYS[5])
return {'ok', generation, head[5]}
"""
"""Become the owner: `ok` with generation and sequence, or the reason. An owner subscribes to `channels` + owner."""

_FENCE: Final = """
local head = redis.call('HMGET', KEYS[1], 'owner', 'generation', 'sequence', 'name')
if head[1] ~= ARGV[1] or head[2] ~= ARGV[2] then
  return {'lost', head[2] or '0', head[3] or '0', head[4] or ''}
end
if tonumber(head[3]) == tonumber(ARGV[3]) then return {'done'} end
if tonumber(head[3]) ~= tonumber(ARGV[3]) - 1 then return {'lost', head[2], head[3], head[4]} end
"""
"""ARGV owner generation sequence. `done`: this commit arrived before, and its answer was lost on the way."""

STAGE: Final = f"""#!lua flags=allow-oom
-- KEYS head staged:*; ARGV owner generation sequence length key value ...
{_FENCE}
local length = redis.call('LLEN', KEYS[2])
if length == tonumber(ARGV[4]) + #ARGV - 4 then return {{'ok'}} end
if length ~= tonumber(ARGV[4]) then return {{'unstaged'}} end
for at = 5, #ARGV, 1000 do
  redis.call('RPUSH', KEYS[2], unpack(ARGV, at, math.min(at + 999, #ARGV)))
end
return {{'ok'}}
"""
"""Stage puts of one table for the commit `sequence`; `length` is how many strings are staged already."""

COMMIT: Final = f"""#!lua flags=allow-oom
-- KEYS head meta payload staged:meta staged:payload
-- ARGV owner generation sequence staged-meta staged-payload puts-meta puts-payload deletes-meta, then the items:
-- keys and values put into META, then PAYLOAD, keys deleted from META, then PAYLOAD
{_FENCE}
local kept = redis.call('HMGET', KEYS[1], 'counted', 'meta', 'payload')
for table = 0, 1 do
  local records = redis.call('HLEN', KEYS[2 + table])
  if kept[1] == head[3] and records ~= tonumber(kept[2 + table]) then
    return {{'evicted', KEYS[2 + table], tostring(records), kept[2 + table]}}
  end
end
for table = 0, 1 do
  if redis.call('LLEN', KEYS[4 + table]) ~= tonumber(ARGV[4 + table]) then return {{'unstaged'}} end
end
local function each(command, key, first, last)
  for at = first, last, 1000 do
    redis.call(command, key, unpack(ARGV, at, math.min(at + 999, last)))
  end
end
for table = 0, 1 do
  for at = 0, tonumber(ARGV[4 + table]) - 1, 1000 do
    local part = redis.call('LRANGE', KEYS[4 + table], at, at + 999)
    redis.call('HSET', KEYS[2 + table], unpack(part))
  end
  redis.call('DEL', KEYS[4 + table])
end
local payload = 9 + tonumber(ARGV[6])
local gone = payload + tonumber(ARGV[7])
local gone_payload = gone + tonumber(ARGV[8])
each('HSET', KEYS[2], 9, payload - 1)
each('HSET', KEYS[3], payload, gone - 1)
each('HDEL', KEYS[2], gone, gone_payload - 1)
each('HDEL', KEYS[3], gone_payload, #ARGV)
redis.call('HSET', KEYS[1], 'sequence', ARGV[3], 'counted', ARGV[3],
  'meta', redis.call('HLEN', KEYS[2]), 'payload', redis.call('HLEN', KEYS[3]))
return {{'done'}}
"""
"""Commit everything of one `apply`, and its number; nothing where records are gone that no commit deleted."""

RELEASE: Final = """#!lua flags=allow-oom
-- KEYS head; ARGV owner generation
local head = redis.call('HMGET', KEYS[1], 'owner', 'generation')
if head[1] == ARGV[1] and head[2] == ARGV[2] then redis.call('HSET', KEYS[1], 'owner', '') end
return {'ok'}
"""
"""Stop owning the store, if this process still owns it."""
