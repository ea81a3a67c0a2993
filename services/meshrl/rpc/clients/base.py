"""The base of every client: a channel, deadlines, long waits cut into polls, retries while a service restarts.

    poll(wait_s)  ─┬─ call ── attempt ──▶ answer
                   │             │ unavailable: pause and repeat, until `retry_s` have passed
                   └─ WaitTimeoutError after `poll_s`: call again, until `wait_s` is over

Keepalive (transport.py) detects a dead service, the deadline of every attempt a hanging one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial, wraps
from typing import Any, Final, Protocol, Self, TypeAlias, TypeVar, cast

import grpc
from typing_extensions import override

from meshrl.common import tracing
from meshrl.contract.errors import (
    CapacityError,
    CorruptError,
    MeshError,
    UnavailableError,
    UserError,
    WaitTimeoutError,
)
from meshrl.rpc import tls
from meshrl.rpc.credentials import Credential, MeshRole
from meshrl.rpc.errors import from_rpc
from meshrl.rpc.methods import Method, MethodTable, bare_row
from meshrl.rpc.transport import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES, SizedMessage

log = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
LOG_EVERY_S: Final = 60.0
"""Seconds between two log lines about the same full disk."""
LAST_WAIT_S: Final = 10.0
"""How long callers still wait for the service after `stop_waiting`."""


def is_full(error: MeshError) -> bool:
    """True if the store had no space. A too large message is a CapacityError too, but would be refused for ever."""
    return isinstance(error, CapacityError) and "free" in error.details


class Patience:
    """Repeats calls of this process while the service's disk is full. Shared by its callers, so that they log once.

    After `stop_waiting` no call is repeated for long, whatever it waits for.
    """

    def __init__(self, *, last_wait_s: float = LAST_WAIT_S) -> None:
        """Callers still wait for the service for `last_wait_s` after `stop_waiting`."""
        self._last_wait_s = last_wait_s
        self._since: float | None = None
        self._logged = False
        self._log_at = 0.0
        self._give_up_at = math.inf

    def stop_waiting(self) -> None:
        """Let no call wait longer than `last_wait_s` from now, because the process is about to end."""
        self._give_up_at = asyncio.get_running_loop().time() + self._last_wait_s

    def check(self, error: MeshError) -> None:
        """Raise `error`, with which a call has failed, when `last_wait_s` is over."""
        if asyncio.get_running_loop().time() >= self._give_up_at:
            raise error

    def refused(self, error: MeshError) -> None:
        """Note that a call was refused. Logs it at first and every LOG_EVERY_S, even if some calls are accepted.

        Raises `error` when `last_wait_s` is over.
        """
        self.check(error)
        now = asyncio.get_running_loop().time()
        if self._since is None:
            self._since = now
        if now >= self._log_at:
            self._logged = True
            self._log_at = now + LOG_EVERY_S
            log.warning("waiting for space, for %.0f s now: %s", now - self._since, error)

    def accepted(self) -> None:
        """Note that a refused call is accepted now."""
        if self._since is not None and self._logged:
            waited_s = asyncio.get_running_loop().time() - self._since
            log.warning("there is space again, after %.0f s", waited_s)
        self._since, self._logged = None, False


class DiskFullWait:
    """The waiting of one call."""

    def __init__(self, policy: Patience, wait_s: float | None) -> None:
        """`wait_s` is the longest wait of the call; None is no limit."""
        self._policy = policy
        self._wait_s = wait_s
        self._began = asyncio.get_running_loop().time()
        self._pause_s = FIRST_PAUSE_S
        self._waited = False

    async def pause(self, error: MeshError) -> None:
        """Wait before the next attempt.

        Raises WaitTimeoutError when `wait_s` is over, or `error` when the policy's `last_wait_s` is over.
        """
        self._waited = True
        self._policy.refused(error)
        # Jitter, so that the workers of a fleet do not all call at the same moment.
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        if self._wait_s is not None:
            remaining_s = self._began + self._wait_s - asyncio.get_running_loop().time()
            if remaining_s <= 0:
                raise WaitTimeoutError(f"timed out waiting for space: {error.message}") from error
            pause_s = min(pause_s, remaining_s)
        await asyncio.sleep(pause_s)
        self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2)

    def done(self) -> None:
        """Note that the call was accepted."""
        if self._waited:
            self._policy.accepted()


F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])
Result = TypeVar("Result")
Attempt: TypeAlias = Callable[..., Awaitable[Result]]
"""A call of a Connection, with all but its `wait_s`."""

SERVICE_RETRY_S: Final = 120.0
"""Seconds for which services repeat calls: longer than a restart with a large store takes."""
INTERACTIVE_RETRY_S: Final = 10.0
"""Seconds for which commands of a person at a terminal repeat calls."""
POLL_S: Final = 20.0
"""The longest wait of one call; well below the server's limit MAX_WAIT_S."""
EARLY: Final = 0.9
"""A timeout before this part of a poll's time was decided by the service. Below 1, since timers are not exact."""
MARGIN_S: Final = 15.0
"""Seconds that an answer may take beyond the requested wait."""
ANSWER_S: Final = 60.0
"""The deadline in seconds of a call that waits for nothing."""
SLOWEST_BYTES_PER_S: Final = 5e6
"""The deadline of a streamed request is extended by the time that its bytes take at this rate (40 Mbit/s)."""


Connect: TypeAlias = Callable[[str], grpc.aio.Channel]
"""Opens a channel to `host:port`."""


def connect(address: str, credential: Credential | None = None) -> grpc.aio.Channel:
    """A channel to a service of the mesh, as every client opens it. Calls carry the credential, or the process's."""
    return tls.channel(address, CHANNEL_OPTIONS, credential)


class RetryBudget:
    """Pauses between attempts, up to two seconds each, until `retry_s` after the first failure."""

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self.reset()

    def reset(self) -> None:
        """Note that a call succeeded: the next failure starts a new budget."""
        self._pause_s = 0.05
        self._give_up_at: float | None = None

    async def pause(self, error: UnavailableError) -> None:
        """Wait before the next attempt. Raises `error` when the budget is used up."""
        now = asyncio.get_running_loop().time()
        if self._give_up_at is None:
            self._give_up_at = now + self._retry_s
            log.info("%s; trying again for %.0f s", error, self._retry_s)
        if now + self._pause_s > self._give_up_at:
            raise error
        # Jitter, so that the workers of a fleet do not all call at the same moment.
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))
        self._pause_s = min(2.0, self._pause_s * 2)


class LongPoll(Protocol):
    """A request, or the header of one, that says how long the service may wait."""

    wait_s: float


class Connection:
    """A channel to one service, and the rules for calls through it."""

    def __init__(
        self,
        service: str,
        address: str,
        retry_s: float,
        metadata: Sequence[tuple[str, str]] = (),
        *,
        patience: Patience | None = None,
        connect: Connect = connect,
        poll_s: float = POLL_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        """Repeat calls that a full disk refuses until there is space, if `patience` is given.

        A call of `poll` waits for `poll_s` at most; the deadline of a call that waits for nothing is `answer_s`.
        """
        self.name = f"{service} at {address}"
        self.channel = connect(address)
        self.metadata = tuple(metadata)
        self.retry_s = retry_s
        self.answer_s = answer_s
        self._poll_s = poll_s
        self._patience = patience
        self._remotes: dict[str, Any] = {}

    async def close(self) -> None:
        """Cancel running calls and close the channel. Idempotent."""
        await self.channel.close(None)

    async def call(
        self,
        method: Method,
        request: Any,
        decode: Callable[[Any], Result],
        *,
        wait_s: float | None = None,
    ) -> Result:
        """Send a message, or the list of those of a stream; receive one, or the list of those of a stream.

        The deadline is that of the call, later by the time that a stream of requests takes, but that of each message
        of a stream of answers. A broken stream begins again.
        """
        deadline_s = self.answer_s if wait_s is None else wait_s + MARGIN_S
        if method.arity == "stream_unary":
            deadline_s += sum(map(self.check_size, request)) / SLOWEST_BYTES_PER_S
        else:
            self.check_size(request)
        begin = partial(self._remote(method), request, metadata=self._with_trace())
        if method.arity == "unary_stream":
            attempt = partial(_collect, begin, deadline_s)
        else:
            attempt = partial(begin, timeout=deadline_s)
        answer = await self._retrying(attempt, wait_s, method.row.repeatable)
        return self.decode(answer, decode)

    async def stream(
        self, method: Method, request: Any, silence_s: float
    ) -> AsyncGenerator[Any, None]:
        """The messages of a stream as they come, for `aclosing`. Nothing is repeated.

        Raises UnavailableError, too, when none comes for `silence_s`.
        """
        begin = partial(self._remote(method), request, metadata=self._with_trace())
        try:
            async with aclosing(_messages(begin, silence_s)) as messages:
                async for message in messages:
                    yield message
        except grpc.aio.AioRpcError as failure:
            raise from_rpc(failure, self.name) from failure
        except TimeoutError as error:
            raise UnavailableError(f"{self.name} has sent nothing for {silence_s:.0f} s") from error

    async def poll(self, request: LongPoll, attempt: Attempt[Result], wait_s: float) -> Result:
        """Call `attempt`, which sends `request`, until it returns or `wait_s` is over. Then raises WaitTimeoutError.

        Each attempt waits for a part of the time, which is set in `request`. If the service ends a wait before its
        time, this raises at once: the request has become pointless (its version is too old to be served), and only
        the caller can change it.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + wait_s
        while True:
            called_at = clock()
            remaining_s = max(0.0, deadline - called_at)
            request.wait_s = seconds = min(remaining_s, self._poll_s)
            try:
                return await attempt(wait_s=seconds)
            except WaitTimeoutError:
                ended_early = clock() - called_at < EARLY * seconds
                if ended_early or remaining_s <= self._poll_s:
                    raise

    async def _retrying(
        self,
        attempt: Callable[[], Awaitable[Result]],
        wait_s: float | None,
        repeatable: bool,
    ) -> Result:
        """The result of the first attempt that reaches the service."""
        budget: RetryBudget | None = None
        space = None if self._patience is None else DiskFullWait(self._patience, wait_s)
        while True:
            try:
                answer = await attempt()
                if space is not None:
                    space.done()
                return answer
            except (grpc.aio.AioRpcError, TimeoutError) as failure:
                error = self._error(failure, wait_s)
                if space is not None and is_full(error):
                    budget = None
                    await space.pause(error)
                    continue
                if not (repeatable and isinstance(error, UnavailableError)):
                    raise error from failure
                if self._patience is not None:
                    self._patience.check(error)
                budget = budget or RetryBudget(self.retry_s)
                await budget.pause(error)

    def _remote(self, method: Method) -> Any:
        if (found := self._remotes.get(method.path)) is None:
            open_method = getattr(self.channel, method.arity)
            found = self._remotes[method.path] = open_method(
                method.path, method.ask.serialize, method.answer.parse
            )
        return found

    def _with_trace(self) -> tuple[tuple[str, str], ...]:
        return (*self.metadata, *tracing.metadata())

    def _error(
        self, failure: grpc.aio.AioRpcError | TimeoutError, wait_s: float | None
    ) -> MeshError:
        """A missed deadline ends a wait. In a call that waits for nothing it means that the service hangs."""
        if isinstance(failure, grpc.aio.AioRpcError):
            error = from_rpc(failure, self.name)
        else:
            error = WaitTimeoutError(f"{self.name} did not answer in time")
        if isinstance(error, WaitTimeoutError) and wait_s is None:
            return UnavailableError(f"{self.name} has not answered within {self.answer_s:.0f} s")
        return error

    def decode(self, answer: Any, decode: Callable[[Any], Result]) -> Result:
        """Decode an answer. Raises CorruptError for an invalid one, since the caller is not at fault."""
        try:
            return decode(answer)
        except UserError as error:
            raise CorruptError(f"{self.name} sent an invalid answer: {error}") from error

    def check_size(self, message: SizedMessage) -> int:
        """The size in bytes. Raises CapacityError for a message that gRPC would refuse to send."""
        size = message.ByteSize()
        if size > MAX_MESSAGE_BYTES:
            raise CapacityError(
                f"a message of {size} bytes for {self.name} is larger than {MAX_MESSAGE_BYTES}",
                size=size,
                limit=MAX_MESSAGE_BYTES,
            )
        return size


class GrpcClient(MethodTable):
    """The base class of the clients: `async with QueueClient("127.0.0.1:7001") as queue`.

    What a row of its table says needs no method here: `call_remote` is the call.
    """

    def __init__(
        self,
        service: str,
        address: str,
        retry_s: float,
        metadata: Sequence[tuple[str, str]] = (),
        *,
        patience: Patience | None = None,
        connect: Connect = connect,
    ) -> None:
        self._connection = Connection(
            service, address, retry_s, metadata, patience=patience, connect=connect
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel running calls and close the connection. Idempotent."""
        await self._connection.close()

    @override
    async def call_remote(self, method: Method, *args: Any, **kwargs: Any) -> Any:
        request = method.encode_arguments(*args, **kwargs)
        attempt: Attempt[Any] = partial(
            self._connection.call, method, request, method.decode_answer
        )
        if method.polls:
            return await self._connection.poll(request, attempt, request.wait_s)
        return await attempt(wait_s=method.row.answer_s)


async def _collect(begin: Callable[[], Any], silence_s: float) -> list[Any]:
    """All messages of a stream. Raises TimeoutError if one takes longer than `silence_s`."""
    async with aclosing(_messages(begin, silence_s)) as messages:
        return [message async for message in messages]


async def _messages(begin: Callable[[], Any], silence_s: float) -> AsyncGenerator[Any, None]:
    call = begin()
    try:
        messages = aiter(call)
        while True:
            async with asyncio.timeout(silence_s):
                message = await anext(messages, None)
            if message is None:
                return
            yield message
    finally:
        call.cancel()


def row(name: str, *roles: MeshRole, **more: Any) -> Callable[[F], F]:
    """A row with the method of a port: in a client it is the remote call with the port's signature and docstring."""

    def made(port: F) -> F:
        @wraps(port)
        async def call(self: MethodTable, /, *args: Any, **kwargs: Any) -> Any:
            return await self.call_remote(self.methods[name], *args, **kwargs)

        call.row = bare_row(name, *roles, port=port, **more)  # type: ignore[attr-defined]
        return cast("F", call)

    return made
