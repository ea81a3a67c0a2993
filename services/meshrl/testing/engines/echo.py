"""An engine without a model: every response repeats its prompt. To try a mesh, and to make it fail.

It satisfies the whole contract (versions, the three ways to update, aborting, capacity). A test can make it `fail`
every request, `stall`, or `crash`: with `behave`, or from another process with a control file.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

import numpy as np
from pydantic import PositiveFloat, PositiveInt

from meshrl.common.config import Config as BaseConfig
from meshrl.common.config import read_options
from meshrl.contract.errors import (
    EngineGoneError,
    FencedError,
    InfraError,
    MeshError,
    NotFoundError,
    UserError,
)
from meshrl.contract.types import (
    EngineStats,
    GenerateDelta,
    GenerateRequest,
    OnUpdate,
    Uint8,
    Version,
    WeightManifest,
)
from meshrl.rollout.ports import UNSERVED
from meshrl.rollout.streams import TokenStream, check_request
from meshrl.rollout.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LOGPROB = -0.5
"""Log-prob of every token."""
POLL_S = 0.02
"""Seconds between two reads of the control file while the engine stalls."""


Push: TypeAlias = Callable[[GenerateDelta | MeshError], None]


class Behaviour(StrEnum):
    """The engine's reaction to requests."""

    ANSWER = "answer"
    FAIL = "fail"
    """Every running request ends with InfraError."""
    STALL = "stall"
    """No request progresses until the behaviour changes."""
    CRASH = "crash"
    """Running requests end with InfraError, and the engine stops."""


class Config(BaseConfig):
    """`rollout.engine` for `rollout.name: echo`."""

    tokens_per_s: PositiveFloat = 1000.0
    """Speed of one request."""
    tokens_per_delta: PositiveInt = 16
    response_tokens: PositiveInt | None = None
    """Length of a response that `max_tokens` does not cut; None: as long as its prompt."""
    control: Path | None = None
    """A file with one of the words answer, fail, stall and crash, which the engine obeys while the file exists."""


def build(
    config: Mapping[str, object],
    *,
    model: Path,
    slots: int,
    tokenizer: Tokenizer | None = None,
) -> EchoEngine:
    """An engine that runs up to `slots` requests at once; `model` and `tokenizer` are ignored."""
    return EchoEngine(read_options(Config, config, where="rollout.engine"), slots=slots)


class EchoEngine:
    """Satisfies `meshrl.contract.ports.Engine`. Response token `i` is prompt token `i`, repeated."""

    def __init__(self, config: Config, *, slots: int) -> None:
        self.version = UNSERVED
        self._config = config
        self._slots = slots
        self._behaviour = Behaviour.ANSWER
        self._staged: set[Version] = set()
        self._answers: set[asyncio.Task[None]] = set()
        self._running = 0
        self._ended: str | None = "not started"
        self._tokens = 0
        self._updates = 0
        # One condition for everything that a request may wait for: a version, the end of an update, a slot.
        self._changed = asyncio.Condition()
        self._updating = False

    def behave(self, behaviour: Behaviour) -> None:
        """Set the behaviour from now on."""
        self._behaviour = behaviour

    async def start(self) -> None:
        """Accept requests."""
        if self._ended == "not started":
            self._ended = None

    async def close(self) -> None:
        """End every request with `abort`; idempotent."""
        self._ended = self._ended or "closed"
        await self._cancel_answers()

    def generate(self, request: GenerateRequest) -> TokenStream:
        """Repeat the prompt."""
        stream = TokenStream()
        try:
            check_request(request)
            if self._ended is not None:
                raise EngineGoneError(f"the engine has stopped: {self._ended}")
        except (UserError, EngineGoneError) as error:
            stream.push(error)
            return stream
        push = stream.push
        answer = asyncio.create_task(self._answer(request, push), name=f"echo {request.request_id}")
        self._answers.add(answer)
        answer.add_done_callback(functools.partial(self._answered, push))
        stream.on_close = functools.partial(_cancel, answer)
        return stream

    def generate_together(self, requests: Sequence[GenerateRequest]) -> Sequence[TokenStream]:
        """Nothing here depends on time, so this is `generate` for each."""
        return [self.generate(request) for request in requests]

    async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
        """Remember the version; there is no model that the tensors could fit."""
        sizes = tuple(len(bucket) for bucket in buckets)
        if sizes != manifest.bucket_bytes:
            raise UserError(
                f"buckets have {sizes} bytes, the manifest says {manifest.bucket_bytes}"
            )
        self._staged.add(manifest.version)

    async def commit_weights(self, version: Version, on_update: OnUpdate) -> None:
        """Label tokens with `version` from now on; a draining update waits for what runs."""
        if version == self.version:
            return
        if version not in self._staged:
            raise NotFoundError(f"version {version} is not staged")
        async with self._changed:
            await self._changed.wait_for(lambda: not self._updating)
            self._updating = True
        try:
            async with self._changed:
                if on_update is OnUpdate.DRAIN:
                    await self._changed.wait_for(lambda: self._running == 0)
                if version < self.version:
                    raise FencedError(f"version {version} is older than the serving {self.version}")
                self.version = version
                self._updates += 1
                self._staged = {each for each in self._staged if each > version}
        finally:
            self._updating = False
            async with self._changed:
                self._changed.notify_all()

    async def discard_weights(self, version: Version) -> None:
        """Forget a staged version."""
        self._staged.discard(version)

    def stats(self) -> EngineStats:
        """Never blocks."""
        return EngineStats(
            version=self.version,
            running=self._running,
            capacity=self._slots,
            tokens_generated=self._tokens,
            tokens_per_s=self._running * self._config.tokens_per_s,
            updates=self._updates,
            update_pause_s=0.0,
        )

    async def _answer(self, request: GenerateRequest, push: Push) -> None:
        """One request, from waiting for a slot to its last delta."""
        async with self._changed:
            await self._changed.wait_for(self._may_start)
            self._running += 1
        try:
            await self._emit(request, push)
        finally:
            self._running -= 1
            async with self._changed:
                self._changed.notify_all()

    def _answered(self, push: Push, answer: asyncio.Task[None]) -> None:
        """Tell a reader whose request was cancelled, perhaps before it began, or failed."""
        self._answers.discard(answer)
        if answer.cancelled():
            push(_delta([], self.version, "abort"))
        elif error := answer.exception():
            log.error("%s", answer.get_name(), exc_info=error)
            push(InfraError(f"the engine failed: {error}"))

    def _may_start(self) -> bool:
        return self.version != UNSERVED and not self._updating and self._running < self._slots

    async def _emit(self, request: GenerateRequest, push: Push) -> None:
        prompt_tokens = len(request.prompt_ids) - request.continued
        whole = self._config.response_tokens or prompt_tokens
        await self._respond(request, push, whole, self._config.tokens_per_delta)

    async def _respond(
        self, request: GenerateRequest, push: Push, whole: int, tokens_per_delta: int
    ) -> None:
        """Push a response of `whole` tokens, or as many as the request allows."""
        sent = request.continued
        prompt = request.prompt_ids[: len(request.prompt_ids) - sent]
        length = min(whole, sent + request.sampling.max_tokens)
        reason = "stop" if whole <= length else "length"
        if sent >= length:
            push(_delta([], self.version, reason))
        while sent < length:
            count = min(tokens_per_delta, length - sent)
            await self._sample(count)
            try:
                await self._obey()
            except InfraError as error:
                push(error)
                return
            tokens = [int(prompt[i % len(prompt)]) for i in range(sent, sent + count)]
            sent += count
            self._tokens += count
            push(_delta(tokens, self.version, reason if sent == length else ""))

    async def _sample(self, tokens: int) -> None:
        """Take the time that the tokens of one request need."""
        await asyncio.sleep(tokens / self._config.tokens_per_s)

    async def _obey(self) -> None:
        """Do what `behave` or the control file says; raises InfraError for a fault."""
        while (behaviour := self._behaviour_now()) is Behaviour.STALL:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)  # a file sends no event
        if behaviour is Behaviour.CRASH:
            self._ended = "told to crash"
        if self._ended is not None:
            raise InfraError(f"the engine has stopped: {self._ended}")
        if behaviour is Behaviour.FAIL:
            raise InfraError("the engine was told to fail")

    def _behaviour_now(self) -> Behaviour:
        control = self._config.control
        if control is None:
            return self._behaviour
        try:
            return Behaviour(control.read_text().strip() or Behaviour.ANSWER)
        except FileNotFoundError:
            return self._behaviour
        except ValueError as error:
            log.warning("%s: %s", control, error)
            return self._behaviour

    async def _cancel_answers(self) -> None:
        answers = list(self._answers)
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)


def _cancel(answer: asyncio.Task[None]) -> None:
    answer.cancel()


def _delta(tokens: Sequence[int], version: Version, reason: str) -> GenerateDelta:
    return GenerateDelta(
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=np.full(len(tokens), LOGPROB, dtype=np.float32),
        version=version,
        finish_reason=reason,
    )
