"""How much a server holds at once: connections, calls, bytes of requests; in all, for one address and for one role.

    connection ──▶ gRPC, which closes the one too many before it reads a byte
    call ──▶ `by_address` ──▶ identity ──▶ `by_role` ──▶ the servicer
                 refused: BusyError (RESOURCE_EXHAUSTED); nothing was done, and clients try again

One address, and one role, has three quarters of what there is, so that others find room. Whoever watches health, for
which nobody needs a credential, has a sixteenth; to ask for health once is always possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import unquote

from grpc_health.v1 import health

from meshrl.contract.errors import BusyError
from meshrl.rpc.identity import ROLES_OF_CALL
from meshrl.rpc.interceptors import RECEIVED, Behavior, Context
from meshrl.rpc.transport import MAX_CALLS, MAX_CONNECTIONS, MAX_REQUEST_BYTES

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
        connections: int = MAX_CONNECTIONS,
    ) -> None:
        """`request_bytes` are those of all requests that are received or worked on."""
        self.options = (
            ("grpc.max_allowed_incoming_connections", connections),
            # By default gRPC cancels calls at random when more than 1,000 begin at once: a fleet that starts.
            ("grpc.server.max_pending_requests", calls),
            ("grpc.server.max_pending_requests_hard_limit", calls),
        )
        """Of the server."""
        self._calls = _Room("calls", calls)
        self._bytes = _Room("bytes of requests", request_bytes)
        self._roles = _Room("calls", calls)

    def by_address(self, method: str, behavior: Behavior) -> Behavior:
        """Interceptor before the caller is known."""
        if method == HEALTH_CHECK:
            return behavior

        async def run(request: Any, context: Context) -> Any:
            # ipv4:10.0.0.1:50250, ipv6:%5B::1%5D:50250, unix:
            address = unquote(context.peer().partition(":")[2].rpartition(":")[0]) or "this machine"
            with self._calls.holding(address, 1), self._bytes.holding(address, 0) as received:
                if isinstance(request, bytes):
                    received(len(request))
                RECEIVED.set(received)
                return await behavior(request, context)

        return run

    def by_role(self, method: str, behavior: Behavior) -> Behavior:
        """Interceptor once the caller is known."""
        if method == HEALTH_CHECK:
            return behavior
        share = HEALTH_SHARE if method == HEALTH_WATCH else SHARE

        async def run(request: Any, context: Context) -> Any:
            roles = ROLES_OF_CALL.get()
            role = f"the role {'+'.join(sorted(roles))}" if roles else f"{method} for anybody"
            with self._roles.holding(role, 1, share):
                return await behavior(request, context)

        return run


class _Room:
    """So much of one thing, and a share of it for each who holds some."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._used = 0
        self._used_by: Counter[str] = Counter()

    @contextmanager
    def holding(self, holder: str, amount: int, share: float = SHARE) -> Iterator[Any]:
        """Hold `amount` while the body runs; it may take more with the function that it is given.

        Raises:
            BusyError: that is more than there is, or than the holder's share.
        """
        held = 0

        def take(more: int) -> None:
            nonlocal held
            most = max(1, int(self._total * share))
            if self._used + more > self._total:
                raise BusyError(
                    f"this service holds {self._used} {self._what} and takes {self._total}: try again"
                )
            if self._used_by[holder] + more > most:
                raise BusyError(
                    f"{holder} holds {self._used_by[holder]} {self._what} here and may hold {most}: try again"
                )
            held += more
            self._used += more
            self._used_by[holder] += more

        try:
            take(amount)
            yield take
        finally:
            self._used -= held
            self._used_by[holder] -= held
            if not self._used_by[holder]:
                del self._used_by[holder]
