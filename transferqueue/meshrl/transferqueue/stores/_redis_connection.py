"""The connection to Redis: finds the master among the addresses, reconnects after a restart or a failover.

    call ──▶ work(client) ──▶ answer
     ▲           │ connection lost, loading, not the master (any more)
     └── pause ──┘ look for the master again, until the timeout

consumes: addresses. waits for: a master that answers. unblocked by: its answer, or the timeout.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
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
    TimeoutError,
)

from meshrl.contract.errors import CapacityError, InfraError, MeshError, UserError

log = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_S: Final = 30.0
"""A server that is silent for longer than this in the middle of a command counts as gone."""
LONGEST_PAUSE_S: Final = 1.0
CANCEL_AGAIN_S: Final = 0.1
_TRY_AGAIN = (ConnectionError, TimeoutError, BusyLoadingError, ReadOnlyError, MasterDownError)
_REFUSED = (AuthenticationError, AuthorizationError, NoPermissionError)


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
            InfraError: no master answered within `timeout_s`, or Redis refused the command.
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
                    raise InfraError(f"redis at {self.name} cannot be reached: {error}") from error
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
        """Until cancelled. waits for: the loss of the connection. produces: a subscription that other queues see."""
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
