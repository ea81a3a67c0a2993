"""Samples of the base model and of models that were saved for a sampler, each by an engine of its own weights.

    request ──▶ a task for it ──▶ sampler of its path ──▶ engine, or an adapter that a server has beside its base
                    └──▶ the answer, kept until it is old       of idle samplers the oldest makes room

consumes: requests of samplers. waits for: the start of an engine; a sampler that becomes idle; tokens. unblocked by:
these, or their errors; `close`. produces: answers. They are not durable: after a restart the SDK asks again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshrl.contract.errors import (
    BusyError,
    EngineGoneError,
    InfraError,
    NotFoundError,
    UnavailableError,
    UserError,
)
from meshrl.contract.types import Float32, GenerateRequest, Int32, Media, SamplingParams
from meshrl.http.tinker.notices import SampleNotices
from meshrl.rollout.ports import Generator
from meshrl.rollout.streams import Response, sample

log = logging.getLogger(__name__)
TRIES = 3
"""Attempts at a sample while its server fails."""
MOST_SAMPLERS = 3
"""Engines at once: as many copies of the weights."""
MOST_RUNNING = 16_384
"""Samples of requests that are not answered yet. The next request is taken while there are fewer."""
SHOWN_BYTES = 256 << 20
"""Pictures of those requests. The next one is taken while there are no more."""
MOST_ANSWERS = 4096
ANSWERS_BYTES = 256 << 20
"""Answers that are kept for a client that asks again, and the bytes of their arrays; the newest is kept always."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleWish:
    """One request."""

    session: str
    """The sampling session."""
    number: int
    """Its number in the session."""
    path: str
    """The sampler: `tinker://MODEL/sampler_weights/NAME`; empty: the base model."""
    prompt: Int32
    media: tuple[Media, ...] = ()
    sampling: SamplingParams
    seeded: bool = False
    """Whether equal seeds give equal draws; otherwise they follow from its name, too."""
    samples: int = 1
    prompt_logprobs: bool = False
    top: int = 0
    """Number of the likeliest tokens that are wanted at each place of the prompt."""
    last: int | None = None
    """Number of tokens at the prompt's end whose log-probs are wanted; None: all."""
    is_polled: bool = True
    """Whether the client may learn of its end by the poll of its session."""

    @property
    def tells_prompt(self) -> bool:
        """Whether anything is wanted of the prompt."""
        return self.prompt_logprobs or self.top > 0

    @property
    def picture_bytes(self) -> int:
        """Bytes of its pictures."""
        return sum(len(picture.data) for picture in self.media)

    @property
    def request(self) -> str:
        """Its name."""
        return request_of(self.session, self.number)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleAnswer:
    """The answer."""

    responses: tuple[Response, ...]
    prompt_logprobs: Float32 | None = None
    """float32[P]: NaN at the first token, and where none was asked for."""
    top_ids: Int32 | None = None
    """int32[P, k]"""
    top_logprobs: Float32 | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        arrays = [self.prompt_logprobs, self.top_ids, self.top_logprobs]
        arrays += [each.tokens for each in self.responses]
        arrays += [each.logprobs for each in self.responses]
        return sum(array.nbytes for array in arrays if array is not None)


def request_of(session: str, number: int) -> str:
    """The name of a request."""
    return f"sample/{session}/{number}"


class SamplerEngine(Generator, Protocol):
    """Samples of one checkpoint."""

    async def close(self) -> None:
        """Free its memory."""
        ...


@dataclass(slots=True, eq=False)
class ServedSampler:
    """One model that is sampled from."""

    engine: asyncio.Task[SamplerEngine]
    folder: Path
    written_ns: int
    """The time when its folder was put in place: another one may have its path later."""
    running: int = 0


class Samplers:
    """All samplers of the server."""

    def __init__(
        self,
        find: Callable[[str], Path],
        start: Callable[[Path], Coroutine[Any, Any, SamplerEngine]],
        notices: SampleNotices,
    ) -> None:
        """Nothing starts before it is asked for.

        Args:
            find: The directory of a sampler; raises NotFoundError, UserError.
            start: An engine that serves a directory.
            notices: Record of the samples that begin and end.
        """
        self._find, self._start = find, start
        self.notices = notices
        self._samplers: OrderedDict[str, ServedSampler] = OrderedDict()
        self._tasks: dict[str, asyncio.Task[SampleAnswer]] = {}
        self._answers: OrderedDict[str, int] = OrderedDict()
        """Bytes of those that are there, by request."""
        self._running = self._kept = self._shown = 0
        self._idle = asyncio.Event()
        self._turns = asyncio.Lock()
        """Requests get samplers in their order, so that none is kept out by those that come later."""

    async def ask(self, wish: SampleWish) -> None:
        """Begin to sample; asking again is asking once.

        Raises:
            BusyError: too many are running, or wait to be fetched.
            NotFoundError: there is no such sampler.
            UnavailableError: the disk refuses to note it.
        """
        if wish.request in self._tasks:
            return
        await asyncio.to_thread(self._find, wish.path)
        if self._running >= MOST_RUNNING or self._shown > SHOWN_BYTES:
            raise BusyError(
                f"{self._running} samples are being drawn, on {self._shown} bytes of pictures",
                retry_after_s=1,
            )
        if wish.is_polled:
            await self.notices.begin(wish.session, wish.number)
        if wish.request in self._tasks:  # asked for twice at once
            return
        self._running += wish.samples
        self._shown += wish.picture_bytes
        task = asyncio.create_task(self._sampled(wish))
        self._tasks[wish.request] = task
        task.add_done_callback(lambda done: self._keep(wish, done))

    def _keep(self, wish: SampleWish, done: asyncio.Task[SampleAnswer]) -> None:
        """Count an answer that is there; older ones make room for it."""
        self._running -= wish.samples
        self._shown -= wish.picture_bytes
        failed = done.cancelled() or done.exception() is not None
        self._answers[wish.request] = 0 if failed else done.result().nbytes
        self._kept += self._answers[wish.request]
        while len(self._answers) > 1 and (
            len(self._answers) > MOST_ANSWERS or self._kept > ANSWERS_BYTES
        ):
            request, nbytes = self._answers.popitem(last=False)
            self._kept -= nbytes
            del self._tasks[request]
        self.notices.ended(wish.session, wish.number)

    async def answer(self, request: str, *, wait_s: float) -> SampleAnswer | None:
        """The answer to a request; None after `wait_s`. Raises its failure, or NotFoundError."""
        task = self._tasks.get(request)
        if task is not None:
            await asyncio.wait({task}, timeout=wait_s)
            if not task.done():
                return None
        session, _, number = request.removeprefix("sample/").rpartition("/")
        if number.isdecimal():
            self.notices.fetched(session, int(number))
        if task is None:
            raise NotFoundError(f"there is no request {request}, or its answer is gone; ask again")
        return task.result()

    def cancel(self, request: str) -> None:
        """Stop sampling for a client that has left."""
        if request in self._tasks:
            self._tasks[request].cancel()

    async def close(self) -> None:
        """End all of it."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for sampler in self._samplers.values():
            await _end(sampler)

    async def _sampled(self, wish: SampleWish) -> SampleAnswer:
        sampler = await self._taken(wish.path)
        try:
            engine = await asyncio.shield(sampler.engine)
            draws = "seeded" if wish.seeded else wish.request
            names = [f"{draws}/{number}" for number in range(wish.samples)]
            requests = [
                GenerateRequest(
                    request_id=name,
                    prompt_ids=wish.prompt,
                    sampling=wish.sampling,
                    media=wish.media,
                )
                for name in names
            ]
            if wish.tells_prompt:
                requests[0] = replace(requests[0], prompt_top=wish.top)
            responses = await asyncio.gather(*(_drawn(engine, each) for each in requests))
        except UnavailableError as error:  # as an answer: nobody asks again for one that is there
            if isinstance(error, EngineGoneError) and self._samplers.get(wish.path) is sampler:
                del self._samplers[wish.path]
            raise InfraError(error.message) from error
        finally:
            sampler.running -= 1
            self._idle.set()
            if not sampler.running and self._samplers.get(wish.path) is not sampler:
                await _end(sampler)
        prompt = responses[0].prompt
        if not wish.tells_prompt:
            return SampleAnswer(responses=tuple(responses))
        if prompt is None:
            raise UserError("prompt_logprobs: the engine returned none for this prompt")
        before = 0 if wish.last is None else max(0, len(wish.prompt) - wish.last)
        return SampleAnswer(
            responses=tuple(responses),
            prompt_logprobs=_hidden(prompt.logprobs, before) if wish.prompt_logprobs else None,
            top_ids=prompt.top_ids if wish.top else None,
            top_logprobs=_hidden(prompt.top_logprobs, before) if wish.top else None,
        )

    async def _taken(self, path: str) -> ServedSampler:
        """The sampler of a path, which is counted as running; one that is idle makes room for it."""
        async with self._turns:
            folder = await asyncio.to_thread(self._find, path)
            written_ns = (await asyncio.to_thread(folder.stat)).st_mtime_ns
            known = self._samplers.get(path)
            if known is not None and (_failed(known.engine) or known.written_ns != written_ns):
                del self._samplers[path]
                if not known.running:
                    await _end(known)
            while path not in self._samplers and len(self._samplers) >= MOST_SAMPLERS:
                idle = [name for name, each in self._samplers.items() if not each.running]
                if idle:
                    await _end(self._samplers.pop(idle[0]))
                    continue
                self._idle.clear()
                await self._idle.wait()
            if path not in self._samplers:
                self._samplers[path] = ServedSampler(
                    asyncio.create_task(self._start(folder)), folder, written_ns
                )
            self._samplers.move_to_end(path)
            self._samplers[path].running += 1
            return self._samplers[path]


def _hidden(logprobs: Float32, before: int) -> Float32:
    """NaN for the tokens before one."""
    told = logprobs.copy()
    told[:before] = np.nan
    return told


async def _drawn(engine: SamplerEngine, request: GenerateRequest) -> Response:
    """A sample; drawn again where a server fails, which its engine starts again."""
    for _ in range(TRIES - 1):
        try:
            return await sample(engine, request)
        except EngineGoneError:
            raise
        except (InfraError, UnavailableError) as error:
            log.warning("request %s is sampled again: %s", request.request_id, error)
    return await sample(engine, request)


def _failed(engine: asyncio.Task[SamplerEngine]) -> bool:
    """Whether an engine did not start."""
    return engine.done() and (engine.cancelled() or engine.exception() is not None)


async def _end(sampler: ServedSampler) -> None:
    """Free an engine, whether it has started or not."""
    sampler.engine.cancel()
    (engine,) = await asyncio.gather(sampler.engine, return_exceptions=True)
    if not isinstance(engine, BaseException):
        await engine.close()
