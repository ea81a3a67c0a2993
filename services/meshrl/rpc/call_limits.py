"""How much a server holds at once: connections, calls, bytes; in all, for one address and for one role.

    connection ──▶ gRPC, which closes the one too many before it reads a byte
    call ──▶ `by_address` ──▶ identity ──▶ `by_role` ──▶ the servicer ──▶ an answer, which the caller reads
                 refused: BusyError (RESOURCE_EXHAUSTED);                 or its connection is closed
                 nothing was done, and clients try again

A call is counted until its answer is sent. One address, and one role, has at most three quarters of each limit,
so that others find room; answers are counted for each role alone. Watchers of health, which need no credential,
have a sixteenth; a single question for health is always answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Final, cast
from urllib.parse import unquote

from grpc_health.v1 import health
from typing_extensions import override

from meshrl.common.sockets import disconnect
from meshrl.contract.errors import BusyError
from meshrl.rpc.credentials import MeshRole
from meshrl.rpc.identity import CALLER
from meshrl.rpc.interceptors import (
    ANSWERED,
    LEAST_RATE,
    PATIENCE_S,
    RECEIVED,
    Answered,
    Behavior,
    Context,
    Pace,
)
from meshrl.rpc.transport import MAX_ANSWER_BYTES, MAX_CALLS, MAX_CONNECTIONS, MAX_REQUEST_BYTES

log = logging.getLogger(__name__)

HEALTH_CHECK: Final = f"/{health.SERVICE_NAME}/Check"
HEALTH_WATCH: Final = f"/{health.SERVICE_NAME}/Watch"
SHARE: Final = 3 / 4
HEALTH_SHARE: Final = 1 / 16
SMALL_BYTES: Final = 64 << 10
"""A single message up to this size is counted as a call only."""
DISCONNECT_S: Final = 1.0
"""Slow callers are disconnected together, so often."""


class CallLimits:
    """Limits of one server. Its interceptors count calls and their bytes, and refuse any beyond a limit."""

    def __init__(
        self,
        *,
        calls: int = MAX_CALLS,
        request_bytes: int = MAX_REQUEST_BYTES,
        answer_bytes: int = MAX_ANSWER_BYTES,
        connections: int = MAX_CONNECTIONS,
    ) -> None:
        """Limits of all calls at once.

        Args:
            calls: Calls that run.
            request_bytes: Bytes of requests that are received or worked on.
            answer_bytes: Bytes that are read and not sent, for the callers of one role.
            connections: Open connections.
        """
        self.options = (
            ("grpc.max_allowed_incoming_connections", connections),
            # By default gRPC cancels calls at random when more than 1,000 begin at once: a fleet that starts.
            ("grpc.server.max_pending_requests", calls),
            ("grpc.server.max_pending_requests_hard_limit", calls),
        )
        """gRPC options of the server."""
        self._calls = Room("calls", calls)
        self._bytes = Room("bytes of requests", request_bytes)
        self._answers = defaultdict[str, Room](partial(Room, "bytes of answers", answer_bytes))
        self._roles = Room("calls", calls)
        self._slow = _SlowCallers()

    def by_address(self, method: str, behavior: Behavior) -> Behavior:
        """Interceptor before the caller is known."""
        if method == HEALTH_CHECK:
            return behavior
        calls, held_bytes = self._calls, self._bytes

        async def run(request: Any, context: Context) -> Any:
            address = _address(context.peer())
            calls.take(address, 1)
            received = _Held(held_bytes, address)

            def end() -> None:
                received.end()
                calls.give_back(address, 1)

            try:
                if isinstance(request, bytes):
                    received(len(request))
                else:
                    RECEIVED.set(received)
                answer = await behavior(request, context)
            except BaseException:
                end()
                raise
            _when_sent(answer, context, end)
            return answer

        return run

    def by_role(self, method: str, behavior: Behavior) -> Behavior:
        """Interceptor once the caller is known."""
        share = HEALTH_SHARE if method == HEALTH_WATCH else SHARE
        calls, anybody = self._roles, f"{method} for anybody"
        counted = method != HEALTH_CHECK

        async def run(request: Any, context: Context) -> Any:
            roles = CALLER.get().roles
            role = _role(roles) if roles else anybody
            if counted:
                calls.take(role, 1, share)
            answered = _Held(self._answers[role], _address(context.peer()))
            ANSWERED.set(answered)
            reader = _Reader(context, self._slow)

            def end() -> None:
                reader.pace.sent()
                answered.end()
                if counted:
                    calls.give_back(role, 1)

            try:
                answer = await behavior(request, cast("Context", reader))
                if answer is not None:
                    size = _size(answer)
                    if size > SMALL_BYTES:
                        answered(size)
                    reader.pace.sends(size)
            except BaseException:
                end()
                raise
            _when_sent(answer, context, end)
            return answer

        return run


def _when_sent(answer: object, context: Context, end: Callable[[], None]) -> None:
    """Call `end` when the answer is sent, or will never be: of a stream, None, all is sent."""
    if answer is None:
        end()
    else:
        context.add_done_callback(lambda _: end())  # type: ignore[arg-type]  # wants a class, takes any function


def _size(message: Any) -> int:
    return len(message) if isinstance(message, bytes) else message.ByteSize()


class _Reader:
    """The context of a call, whose caller loses its connection if it reads an answer too slowly.

    gRPC lets a server end no call alone while a message of it is on its way: that would stay in memory.
    """

    def __init__(self, context: Context, slow: _SlowCallers) -> None:
        self._context = context
        self.pace = Pace(lambda: slow.add(context.peer()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        """Send one message of a stream."""
        self.pace.sends(_size(message))
        try:
            await self._context.write(message)
        finally:
            self.pace.sent()


class _SlowCallers:
    """Ends the connections of callers that do not read."""

    def __init__(self) -> None:
        self._peers: set[str] = set()

    def add(self, peer: str) -> None:
        """End it soon."""
        if not self._peers:
            asyncio.get_running_loop().call_later(DISCONNECT_S, self._disconnect)
        self._peers.add(peer)

    def _disconnect(self) -> None:
        peers = {peer.partition(":")[2]: None for peer in self._peers}
        self._peers.clear()
        log.warning(
            "%s read an answer at less than %g MiB a second for %g s: disconnected",
            ", ".join(sorted(map(unquote, peers))[:10]),
            LEAST_RATE / 2**20,
            PATIENCE_S,
        )
        disconnect(map(unquote, peers))


@lru_cache(maxsize=MAX_CONNECTIONS)
def _address(peer: str) -> str:
    """The address in gRPC's ipv4:10.0.0.1:50250, ipv6:%5B::1%5D:50250, unix:."""
    return unquote(peer.partition(":")[2].rpartition(":")[0]) or "this machine"


@lru_cache(maxsize=256)
def _role(roles: frozenset[MeshRole]) -> str:
    return f"the role {'+'.join(sorted(roles))}"


class _Held(Answered):
    """Bytes that one call has of those that a server holds."""

    __slots__ = ("_holder", "_room", "held")

    def __init__(self, room: Room, holder: str) -> None:
        self._room = room
        self._holder = holder
        self.held = 0

    @override
    def __call__(self, more: int) -> None:
        self._room.take(self._holder, more)
        self.held += more

    @override
    def end(self) -> None:
        if self.held:
            self._room.give_back(self._holder, self.held)
            self.held = 0


class Room:
    """A limited amount of one resource, and the share of each holder."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._used = 0
        self._used_by: dict[str, int] = {}

    def take(self, holder: str, amount: int, share: float = SHARE) -> None:
        """Hold `amount` until it is given back. A caller that holds nothing may hold more than its share.

        Raises:
            BusyError: that is more than there is and something is held, or than the holder's share.
        """
        used, before = self._used + amount, self._used_by.get(holder, 0)
        if used > self._total and self._used:
            raise BusyError(
                f"this service holds {self._used} {self._what} and takes {self._total}: try again"
            )
        if before and before + amount > (most := max(1, int(self._total * share))):
            raise BusyError(
                f"{holder} holds {before} {self._what} here and may hold {most}: try again"
            )
        self._used = used
        if before + amount:
            self._used_by[holder] = before + amount

    def give_back(self, holder: str, amount: int) -> None:
        """Return an amount that `take` has taken."""
        self._used -= amount
        left = self._used_by.pop(holder) - amount
        if left:
            self._used_by[holder] = left
