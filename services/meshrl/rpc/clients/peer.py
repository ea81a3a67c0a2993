"""How to call a service: a channel, deadlines, long waits cut into long polls, patience while it restarts.

    poll(wait_s)  ─┬─ ask ── attempt ──▶ answer
                   │            │ unavailable: pause, attempt again, until `patience_s` of it are over
                   └─ no rows within POLL_S: ask again, until `wait_s` is over

A dead peer is noticed by keepalive (transport.py), a hanging one by the deadline of every attempt.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

import grpc
from google.protobuf.message import Message

from meshrl.contract.errors import (
    CapacityError,
    CorruptError,
    MeshError,
    UnavailableError,
    UserError,
    WaitTimeoutError,
)
from meshrl.rpc import tls
from meshrl.rpc.clients.disk_full import DiskFullPolicy, DiskFullWait, is_full
from meshrl.rpc.errors import from_rpc
from meshrl.rpc.transport import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES, SizedMessage

log = logging.getLogger(__name__)


Question = TypeVar("Question", bound=SizedMessage)
Answer = TypeVar("Answer", bound=SizedMessage)
Noun = TypeVar("Noun")

STAGE_PATIENCE_S: Final = 120.0
"""For services: longer than a restart with a large store takes."""
PERSON_PATIENCE_S: Final = 10.0
"""For a person at a terminal."""
POLL_S: Final = 20.0
"""The longest single question; well below the server's own patience."""
EARLY: Final = 0.9
"""The part of a poll before which its end is no timeout but an answer; timers are not exact."""
MARGIN_S: Final = 15.0
"""What an answer may take beyond the wait that was asked for."""
ANSWER_S: Final = 60.0
"""The deadline of a question that waits for nothing."""
SLOWEST_BYTES_PER_S: Final = 5e6
"""A streamed request gets its bytes' time at this rate on top: 40 Mbit/s."""


class Patience:
    """Pauses between attempts, growing to two seconds, until `patience_s` after the first failure."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self.relax()

    def relax(self) -> None:
        """It works again."""
        self._pause_s = 0.05
        self._give_up_at: float | None = None

    async def pause(self, error: UnavailableError) -> None:
        """Raises `error` once patience is at its end."""
        now = asyncio.get_running_loop().time()
        if self._give_up_at is None:
            self._give_up_at = now + self._patience_s
            log.info("%s; trying again for %.0f s", error, self._patience_s)
        if now + self._pause_s > self._give_up_at:
            raise error
        # Jitter, so that a fleet does not come back in step.
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))
        self._pause_s = min(2.0, self._pause_s * 2)


class Peer:
    """A channel to one service and the manners of calling it."""

    def __init__(
        self,
        service: str,
        address: str,
        patience_s: float,
        metadata: Sequence[tuple[str, str]] = (),
        *,
        disk_full: DiskFullPolicy | None = None,
    ) -> None:
        """With a `disk_full`, what a full disk refuses is asked again until there is space (space.py)."""
        self.name = f"{service} at {address}"
        self.channel = tls.channel(address, CHANNEL_OPTIONS)
        self.metadata = (*tls.call_metadata(), *metadata)
        self.patience_s = patience_s
        self._disk_full = disk_full

    async def close(self) -> None:
        """Cancel what runs and hang up; idempotent."""
        await self.channel.close(None)

    async def ask(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Question, Answer],
        question: Question,
        decode: Callable[[Answer], Noun],
        *,
        wait_s: float | None = None,
        repeatable: bool = True,
    ) -> Noun:
        """One message there, one back. `repeatable` when doing it twice is doing it once."""
        self.check_size(question)

        async def attempt() -> Answer:
            return await method(question, timeout=_deadline_s(wait_s), metadata=self.metadata)

        answer = await self._patiently(attempt, wait_s, repeatable)
        return self.understand(answer, decode)

    async def ask_for_stream(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[Question, Answer],
        question: Question,
        decode: Callable[[Sequence[Answer]], Noun],
        *,
        wait_s: float | None = None,
    ) -> Noun:
        """One message there, a stream back, each message within the deadline; asked for again if it breaks."""
        self.check_size(question)

        async def attempt() -> list[Answer]:
            call = method(question, metadata=self.metadata)
            try:
                return await _collected(call, _deadline_s(wait_s))
            finally:
                call.cancel()

        return self.understand(await self._patiently(attempt, wait_s), decode)

    async def tell_stream(
        self,
        method: grpc.aio.StreamUnaryMultiCallable[Question, Answer],
        questions: Sequence[Question],
        decode: Callable[[Answer], Noun],
        *,
        wait_s: float | None = None,
    ) -> Noun:
        """A stream there, one message back; the whole stream is sent again if it breaks."""
        sending_s = sum(map(self.check_size, questions)) / SLOWEST_BYTES_PER_S

        async def attempt() -> Answer:
            deadline_s = _deadline_s(wait_s) + sending_s
            return await method(iter(questions), timeout=deadline_s, metadata=self.metadata)

        return self.understand(await self._patiently(attempt, wait_s), decode)

    async def poll(self, wait_s: float, ask: Callable[[float], Awaitable[Noun]]) -> Noun:
        """Calls `ask(seconds)` until it answers or `wait_s` is over; then its WaitTimeoutError.

        A wait that the service ends before its time is not asked for again: something that the question says has
        become pointless (a version too old to be served), and only the caller can ask better.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + wait_s
        while True:
            asked_at = clock()
            left = max(0.0, deadline - asked_at)
            seconds = min(left, POLL_S)
            try:
                return await ask(seconds)
            except WaitTimeoutError:
                ended_early = clock() - asked_at < EARLY * seconds
                if ended_early or left <= POLL_S:
                    raise

    async def _patiently(
        self,
        attempt: Callable[[], Awaitable[Noun]],
        wait_s: float | None,
        repeatable: bool = True,
    ) -> Noun:
        """The result of the first attempt that reaches the service."""
        patience = Patience(self.patience_s)
        space = None if self._disk_full is None else DiskFullWait(self._disk_full, wait_s)
        while True:
            try:
                answer = await attempt()
                if space is not None:
                    space.done()
                return answer
            except (grpc.aio.AioRpcError, TimeoutError) as failure:
                error = self._error(failure, wait_s)
                if space is not None and is_full(error):
                    patience.relax()
                    await space.pause(error)
                    continue
                if not (repeatable and isinstance(error, UnavailableError)):
                    raise error from failure
                await patience.pause(error)

    def _error(
        self, failure: grpc.aio.AioRpcError | TimeoutError, wait_s: float | None
    ) -> MeshError:
        """A missed deadline ends a wait; where nothing was to be waited for, the service hangs."""
        if isinstance(failure, grpc.aio.AioRpcError):
            error = from_rpc(failure, self.name)
        else:
            error = WaitTimeoutError(f"{self.name} did not answer in time")
        if isinstance(error, WaitTimeoutError) and wait_s is None:
            return UnavailableError(f"{self.name} has not answered within {ANSWER_S:.0f} s")
        return error

    def understand(self, answer: Answer | Sequence[Answer], decode: Callable[..., Noun]) -> Noun:
        """Decode an answer. One that makes no sense is the service's mistake, not the caller's."""
        try:
            return decode(answer)
        except UserError as error:
            raise CorruptError(f"{self.name} answered nonsense: {error}") from error

    def check_size(self, message: SizedMessage) -> int:
        """Its bytes. Raises CapacityError for a message that gRPC would refuse to send."""
        size = message.ByteSize()
        if size > MAX_MESSAGE_BYTES:
            raise CapacityError(
                f"a message of {size} bytes for {self.name} is larger than {MAX_MESSAGE_BYTES}",
                size=size,
                limit=MAX_MESSAGE_BYTES,
            )
        return size


class Wire:
    """The base of every client: `async with QueueClient("127.0.0.1:7001") as queue`."""

    def __init__(
        self,
        service: str,
        address: str,
        patience_s: float,
        metadata: Sequence[tuple[str, str]] = (),
        *,
        disk_full: DiskFullPolicy | None = None,
    ) -> None:
        self._peer = Peer(service, address, patience_s, metadata, disk_full=disk_full)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what runs and hang up; idempotent."""
        await self._peer.close()


def _deadline_s(wait_s: float | None) -> float:
    return ANSWER_S if wait_s is None else wait_s + MARGIN_S


async def _collected(messages: AsyncIterable[Answer], silence_s: float) -> list[Answer]:
    """All of a stream. Raises TimeoutError when the next message takes longer than `silence_s`."""
    found: list[Answer] = []
    clock = asyncio.get_running_loop().time
    async with asyncio.timeout(silence_s) as silence:
        async for message in messages:
            found.append(message)
            silence.reschedule(clock() + silence_s)
    return found


def nothing(_: Message) -> None:
    """Decodes an answer that has nothing to say but "done"."""
