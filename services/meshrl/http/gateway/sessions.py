"""The table of open sessions: finds them by API key, queues callers who claim one, and counts them for Prometheus."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from meshrl.common.sockets import join_address
from meshrl.contract.errors import (
    ForbiddenError,
    UnauthenticatedError,
    UnavailableError,
    WaitTimeoutError,
)
from meshrl.contract.types import PostedReward
from meshrl.rollout.agents.requests import SessionEndedError
from meshrl.rollout.agents.session import Address, AgentSession
from meshrl.rpc.credentials import sha256
from meshrl.rpc.http_server import ConnectionLimits, serving_on

if TYPE_CHECKING:
    from meshrl.http.gateway.responses import SaidBefore

log = logging.getLogger(__name__)

REMEMBERED = 4096
"""Ended sessions that are remembered, so that their clients get 'ended' instead of 'unknown key'."""
MOST_TOLD = 64
"""Names of ignored fields that are logged: clients invent them."""
MAX_TOLD_CHARS = 64
ROW_LIMITS = ConnectionLimits(64)
"""Connections from the container of one row."""
NO_KEY = "unused"
"""The key of clients in a container: they are known by the socket on which they come."""
Claim: TypeAlias = asyncio.Future[AgentSession]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A session that has ended."""

    id: str
    why: str
    finished: bool
    """The agent finished it, or posted a reward that ended it."""
    reward: PostedReward | None


class SessionTable:
    """Implements the Gateway port. Finds sessions by a hash of their key, against timing attacks."""

    def __init__(self, *, prompt_tokens: int | None) -> None:
        """Serves at once: callers who claim before there is a worker wait for it."""
        self.url = ""
        """Address of the HTTP server, `http://host:port`; empty before it serves."""
        self.prompt_tokens = prompt_tokens
        self.opened_ever = 0
        self.tokens_left_out = 0
        """Sampled tokens of ended sessions that are not in their rows."""
        self.on_demand: Callable[[], None] = lambda: None
        """Called when another caller waits for a session; a worker sets it, and looks at `demand` when it starts."""
        self.row_app: Callable[[Address], ASGIApp]
        """Makes an app for processes that may sample for one session; set by the app of the gateway."""
        self._open: dict[str, AgentSession] = {}
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        self._claims: deque[Claim] = deque()
        """Claims of callers that wait, the oldest first."""
        self.said: WeakKeyDictionary[AgentSession, SaidBefore] = WeakKeyDictionary()
        """The conversations of open sessions by their answers, for clients that name an answer."""
        self._draining = False
        self._told: set[str] = set()

    @property
    def open_sessions(self) -> int:
        """Number of open sessions."""
        return len(self._open)

    @property
    def demand(self) -> int:
        """Number of callers who wait for a session."""
        return len(self._claims)

    def tell_ignored(self, session: AgentSession, fields: Collection[str]) -> None:
        """Say once in the log, whichever session comes first, that a field of requests changes nothing."""
        new = sorted({name[:MAX_TOLD_CHARS] for name in fields} - self._told)
        new = new[: MOST_TOLD - len(self._told)]
        self._told.update(new)
        if new:
            log.warning(
                "%s: fields of its agent's requests are ignored: %s", session.uid, ", ".join(new)
            )

    @contextmanager
    def opened(self, session: AgentSession) -> Iterator[Address]:
        """Accept requests for `session` during the context."""
        key = sha256(session.token)
        self._open[key] = session
        self.opened_ever += 1
        try:
            yield address(self.url, session)
        finally:
            del self._open[key]
            self.tokens_left_out += session.left_out
            why = session.ended or "it is over"
            finished = session.finished.is_set()
            self._ended[key] = Ended(
                id=session.id, why=why, finished=finished, reward=session.reward
            )
            if len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)

    @asynccontextmanager
    async def bound(self, address: Address, listener: socket.socket) -> AsyncIterator[Address]:
        """Let clients of `listener` sample for the session at `address`, and do nothing else."""
        url = f"http://{join_address(*listener.getsockname())}/v1"
        app = self.row_app(address)
        async with serving_on(listener, app, ROW_LIMITS, name="gateway of a row", grace_s=0):
            yield Address(base_url=url, api_key=NO_KEY)

    def hand_over(self, session: AgentSession, address: Address) -> bool:
        """Give an open session to the external agent that has waited longest; False when none waits."""
        if not self._claims:
            return False
        self._claims.popleft().set_result(session)
        return True

    async def claim(self, wait_s: float) -> AgentSession:
        """A session for an external agent.

        Raises:
            WaitTimeoutError: no row came within `wait_s` seconds.
            UnavailableError: the worker drains.
        """
        if self._draining:
            raise UnavailableError("this worker drains: claim at another one")
        claim: Claim = asyncio.get_running_loop().create_future()
        self._claims.append(claim)
        try:
            self.on_demand()
            await asyncio.wait({claim}, timeout=wait_s)
            if not claim.done():
                raise WaitTimeoutError(f"no row came within {wait_s:g} s")
            return claim.result()  # also a session that came at the deadline
        except asyncio.CancelledError:
            if claim.done() and not claim.exception():
                claim.result().finished.set()  # the caller does not get it: its row goes back
            raise
        finally:
            if claim in self._claims:
                self._claims.remove(claim)

    def find(self, authorization: str, session_id: str | None = None) -> AgentSession:
        """The session of this key; `session_id`, if given, must be its id.

        Raises:
            UnauthenticatedError: no key, or an unknown one.
            ForbiddenError: the key is another session's.
            SessionEndedError: the session has ended.
        """
        key = sha256(_bearer(authorization))
        session = self._open.get(key)
        if session is None:
            ended = self._ended.get(key)
            if ended is None:
                raise UnauthenticatedError("this API key belongs to no session")
            _check_id(ended.id, session_id)
            raise SessionEndedError(f"the session has ended: {ended.why}")
        _check_id(session.id, session_id)
        return session

    def ended(self, authorization: str) -> Ended | None:
        """The ended session of this key, if it is remembered."""
        return self._ended.get(sha256(_bearer(authorization)))

    def drain(self) -> None:
        """Give out no more sessions; waiting callers get UnavailableError."""
        self._draining = True
        while self._claims:
            drains = UnavailableError("this worker drains: claim at another one")
            self._claims.popleft().set_exception(drains)


def address(url: str, session: AgentSession) -> Address:
    """Address of a session under `url`."""
    return Address(base_url=f"{url}/sessions/{session.id}/v1", api_key=session.token)


def _check_id(session_id: str, expected: str | None) -> None:
    if expected is not None and expected != session_id:
        raise ForbiddenError("this API key belongs to another session")


def _bearer(authorization: str) -> str:
    scheme, _, token = authorization.strip().partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise UnauthenticatedError("a session needs its API key: Authorization: Bearer <api_key>")
    return token.strip()


class GatewayMetrics(Collector):
    """Collected on each scrape."""

    def __init__(self, sessions: SessionTable) -> None:
        self._sessions = sessions

    def collect(self) -> Iterator[Metric]:
        """Two gauges, two counters."""
        sessions = self._sessions
        yield GaugeMetricFamily(
            "meshrl_gateway_sessions", "Open sessions.", value=sessions.open_sessions
        )
        yield GaugeMetricFamily(
            "meshrl_gateway_claims_waiting",
            "External agents that wait for a row.",
            value=sessions.demand,
        )
        yield CounterMetricFamily(
            "meshrl_gateway_sessions_opened",
            "Sessions opened since the start.",
            value=sessions.opened_ever,
        )
        yield CounterMetricFamily(
            "meshrl_gateway_tokens_left_out",
            "Sampled tokens of ended sessions that lie on branches which are not trained.",
            value=sessions.tokens_left_out,
        )
