"""How much a server holds at once: connections, calls, bytes; in all, for one address and for one role.

    connection ──▶ gRPC, which closes the one too many before it reads a byte
    call ──▶ `by_address` ──▶ identity ──▶ `by_role` ──▶ the servicer
                 refused: BusyError (RESOURCE_EXHAUSTED); nothing was done, and clients try again

One address, and one role, has three quarters of what there is, so that others find room. Whoever watches health, for
which nobody needs a credential, has a sixteenth; to ask for health once is always possible.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote

from grpc_health.v1 import health
from typing_extensions import override

from meshrl.contract.errors import BusyError
from meshrl.rpc.credentials import MeshRole
from meshrl.rpc.identity import CALLER
from meshrl.rpc.interceptors import ANSWERED, RECEIVED, Answered, Behavior, Context
from meshrl.rpc.transport import MAX_ANSWER_BYTES, MAX_CALLS, MAX_CONNECTIONS, MAX_REQUEST_BYTES

HEALTH_CHECK: Final = f"/{health.SERVICE_NAME}/Check"
HEALTH_WATCH: Final = f"/{health.SERVICE_NAME}/Watch"
SHARE: Final = 3 / 4
HEALTH_SHARE: Final = 1 / 16


class CallLimits:
    """What one server holds. Its interceptors count what runs, and refuse what is too much."""

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
            answer_bytes: Bytes of payload that are read and not sent.
            connections: Open connections.
        """
        self.options = (
            ("grpc.max_allowed_incoming_connections", connections),
            # By default gRPC cancels calls at random when more than 1,000 begin at once: a fleet that starts.
            ("grpc.server.max_pending_requests", calls),
            ("grpc.server.max_pending_requests_hard_limit", calls),
        )
        """Of the server."""
        self._calls = _Room("calls", calls)
        self._bytes = _Room("bytes of requests", request_bytes)
        self._answers = _Room("bytes of answers", answer_bytes)
        self._roles = _Room("calls", calls)

    def by_address(self, method: str, behavior: Behavior) -> Behavior:
        """Interceptor before the caller is known."""
        if method == HEALTH_CHECK:
            return behavior
        calls, held_bytes = self._calls, self._bytes

        async def run(request: Any, context: Context) -> Any:
            address = _address(context.peer())
            calls.take(address, 1)
            received = _Held(held_bytes, address)
            answered = _Held(self._answers, address)
            ANSWERED.set(answered)
            try:
                if isinstance(request, bytes):
                    received(len(request))
                else:
                    RECEIVED.set(received)
                return await behavior(request, context)
            finally:
                received.end()
                answered.end()
                calls.give_back(address, 1)

        return run

    def by_role(self, method: str, behavior: Behavior) -> Behavior:
        """Interceptor once the caller is known."""
        if method == HEALTH_CHECK:
            return behavior
        share = HEALTH_SHARE if method == HEALTH_WATCH else SHARE
        calls, anybody = self._roles, f"{method} for anybody"

        async def run(request: Any, context: Context) -> Any:
            roles = CALLER.get().roles
            role = _role(roles) if roles else anybody
            calls.take(role, 1, share)
            try:
                return await behavior(request, context)
            finally:
                calls.give_back(role, 1)

        return run


@lru_cache(maxsize=MAX_CONNECTIONS)
def _address(peer: str) -> str:
    """Of gRPC's ipv4:10.0.0.1:50250, ipv6:%5B::1%5D:50250, unix:."""
    return unquote(peer.partition(":")[2].rpartition(":")[0]) or "this machine"


@lru_cache(maxsize=256)
def _role(roles: frozenset[MeshRole]) -> str:
    return f"the role {'+'.join(sorted(roles))}"


class _Held(Answered):
    """Bytes that one call has of those that a server holds."""

    __slots__ = ("_holder", "_room", "held")

    def __init__(self, room: _Room, holder: str) -> None:
        self._room = room
        self._holder = holder
        self.held = 0

    @override
    def __call__(self, more: int, *, there: bool = False) -> None:
        if more < 0:
            self._room.give_back(self._holder, -more)
        else:
            self._room.take(self._holder, more, there=there)
        self.held += more

    def end(self) -> None:
        """Hold nothing any more."""
        if self.held:
            self(-self.held)


class _Room:
    """So much of one thing, and a share of it for each who holds some."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._used = 0
        self._used_by: dict[str, int] = {}

    def take(self, holder: str, amount: int, share: float = SHARE, *, there: bool = False) -> None:
        """Hold `amount` until it is given back; `there`: also beyond what there is.

        Raises:
            BusyError: that is more than there is, or than the holder's share.
        """
        used, mine = self._used + amount, self._used_by.get(holder, 0) + amount
        if used > self._total and not there:
            raise BusyError(
                f"this service holds {self._used} {self._what} and takes {self._total}: try again"
            )
        if mine > (most := max(1, int(self._total * share))) and not there:
            raise BusyError(
                f"{holder} holds {mine - amount} {self._what} here and may hold {most}: try again"
            )
        self._used = used
        if mine:
            self._used_by[holder] = mine

    def give_back(self, holder: str, amount: int) -> None:
        """What `take` took."""
        self._used -= amount
        left = self._used_by.pop(holder) - amount
        if left:
            self._used_by[holder] = left
