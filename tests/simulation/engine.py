"""An engine: a response takes a time that belongs to its row, and its tokens are the weights that sampled them.

The bytes of each version say which version they are (see weights.py), so a token shows what the engine really held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from meshrl.contract.errors import InfraError, NotFoundError, UnavailableError
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
from meshrl.rollout.streams import TokenStream

STEP_BITS: Final = 20
"""A token is `epoch << STEP_BITS | step`."""
TURN_TOKENS: Final = 8
"""A request with a stop string is a turn of a conversation, and stops after so many tokens."""


def token_of(version: Version) -> int:
    """The token that an engine at `version` samples."""
    return version.epoch << STEP_BITS | version.step


class SimulatedEngine:
    """Satisfies `Engine`."""

    def __init__(
        self,
        seconds_of: Callable[[str], float],
        *,
        slots: int,
        deltas: int,
        loads: Callable[[], asyncio.Future[None]],
        serves: Callable[[Version], object],
        problem: Callable[[str], None],
    ) -> None:
        """Serves nothing yet.

        Args:
            seconds_of: how long the whole response to a request id takes.
            slots: requests at a time.
            deltas: parts of a response.
            loads: the time that weights take into the engine, as a future that begins now.
            serves: hears of each version that is served from now on.
            problem: hears of weights that must not be.
        """
        self.version = UNSERVED
        self.failing_until = 0.0
        """Requests fail until then."""
        self.loading_fails_until = 0.0
        """Weights cannot be staged until then."""
        self.switch_fails_until = 0.0
        """The engine breaks if it switches until then."""
        self._seconds_of = seconds_of
        self._slots = slots
        self._deltas = deltas
        self._loads = loads
        self._serves = serves
        self._problem = problem
        self._staged: dict[Version, Sequence[Uint8]] = {}
        self._weights: Sequence[Uint8] = ()
        self._running = 0
        self._tokens = 0
        self._updates = 0
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._admits = asyncio.Event()
        """Not set while an update waits for the running requests."""
        self._admits.set()
        self._answers: dict[asyncio.Task[None], None] = {}
        self._clock = asyncio.get_running_loop().time

    async def start(self) -> None:
        """Nothing to load."""

    async def close(self) -> None:
        """End what runs."""
        self._closed = True
        for answer in list(self._answers):
            answer.cancel()
        await asyncio.gather(*self._answers, return_exceptions=True)

    async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
        """Keep the buckets, not copied."""
        await self._loads()
        if self.loading_fails_until > self._clock():
            raise InfraError("simulated: no memory for a second version")
        self._staged[manifest.version] = buckets

    async def commit_weights(self, version: Version, on_update: OnUpdate) -> None:
        """Sample with `version` from the next delta on; a draining update waits for what runs."""
        if version not in self._staged:
            raise NotFoundError(f"version {version} is not staged")
        if on_update is OnUpdate.DRAIN:
            self._admits.clear()
        try:
            if on_update is OnUpdate.DRAIN:
                await self._idle.wait()
            await self._loads()
            if self.switch_fails_until > self._clock():
                raise RuntimeError("simulated: the engine broke while it switched weights")
            self._switch(version)
        finally:
            self._admits.set()

    def _switch(self, version: Version) -> None:
        if version < self.version:
            self._problem(f"an engine went back from version {self.version} to {version}")
        self._weights = self._staged.pop(version)
        self.version = version
        self._updates += 1
        if self._held() != {token_of(version)}:
            self._problem(f"an engine was told to serve {version} and holds other weights")
        self._serves(version)

    async def discard_weights(self, version: Version) -> None:
        """Forget what was staged."""
        self._staged.pop(version, None)

    def stats(self) -> EngineStats:
        """Never blocks."""
        return EngineStats(
            version=self.version,
            running=self._running,
            capacity=self._slots,
            tokens_generated=self._tokens,
            tokens_per_s=0.0,
            updates=self._updates,
            update_pause_s=0.0,
        )

    def generate(self, request: GenerateRequest) -> TokenStream:
        """Sample one response."""
        stream = TokenStream()
        if self._closed:
            stream.push(UnavailableError("the engine is closed"))
            return stream
        answer = asyncio.create_task(self._answer(request, stream), name="engine-answer")
        self._answers[answer] = None
        answer.add_done_callback(lambda task: self._answers.pop(task, None))
        stream.on_close = lambda: _cancel(answer)
        return stream

    async def _answer(self, request: GenerateRequest, stream: TokenStream) -> None:
        await self._admits.wait()
        self._running += 1
        self._idle.clear()
        try:
            whole, finish_reason = request.sampling.max_tokens + request.continued, "length"
            if request.sampling.stop and whole >= TURN_TOKENS:
                whole, finish_reason = TURN_TOKENS, "stop"
            left = max(0, whole - request.continued)
            if not left:
                stream.push(self._delta(0, finish_reason))
            pause_s = self._seconds_of(request.request_id) / max(1, whole)
            size = max(1, -(-whole // self._deltas))
            while left > 0:
                count = min(size, left)
                await asyncio.sleep(pause_s * count)
                if self.failing_until > self._clock():
                    stream.push(InfraError("simulated: the engine failed"))
                    return
                left -= count
                self._tokens += count
                stream.push(self._delta(count, "" if left else finish_reason))
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    def _delta(self, count: int, finish_reason: str) -> GenerateDelta:
        held = self._held()
        if len(held) != 1:
            self._problem(f"an engine at {self.version} holds a mixture of versions")
        return GenerateDelta(
            tokens=np.full(count, min(held, default=0), np.int32),
            logprobs=np.zeros(count, np.float32),
            version=self.version,
            finish_reason=finish_reason,
        )

    def _held(self) -> set[int]:
        """The tokens that the weights stand for: one, unless versions are mixed."""
        return {int(word) for bucket in self._weights for word in bucket.view(np.uint32)[[0, -1]]}


def _cancel(answer: asyncio.Task[None]) -> None:
    answer.cancel()
