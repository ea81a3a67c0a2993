"""An engine without a model that takes a GPU's time: `meshrl plan` is checked against meshes that run it.

`rollout.name: tests.doubles.paced_engine`. Its requests share its speed as in the simulated fleet (setting.py), and
the lengths of its responses are drawn from the same distribution; everything else is the echo engine's.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from meshrl.common.config import Config as BaseConfig
from meshrl.common.config import read_options
from meshrl.contract.errors import ConfigError
from meshrl.contract.types import GenerateRequest, OnUpdate, Version
from meshrl.planning.setting import P99, Lengths, PacedGpu
from meshrl.rollout.tokenizer import Tokenizer
from meshrl.testing.engines import echo

MOST_TOKENS = 1 << 20
"""No response is longer."""


class Config(BaseConfig):
    """`rollout.engine` for this engine."""

    tokens_per_s: PositiveFloat = 1000.0
    """Speed of the engine with all slots busy."""
    alone_speedup: float = Field(1.0, ge=1.0)
    """A request that runs alone is so many times as fast as one among `rollout.slots`."""
    tokens_per_delta: PositiveInt = 16
    length_mean: PositiveFloat = 256.0
    """Tokens of a response, before `max_tokens` cuts it."""
    length_p99: PositiveFloat = 1024.0
    """Tokens that one response in a hundred exceeds."""
    alike: float = Field(0.0, ge=0.0, le=1.0)
    """The share of the lengths' variance that belongs to the prompt."""
    commit_s: NonNegativeFloat = 0.0
    """How long an update pauses the engine."""


def build(
    config: Mapping[str, object],
    *,
    model: Path,
    slots: int,
    tokenizer: Tokenizer | None = None,
) -> PacedEngine:
    """An engine that runs up to `slots` requests at once; `model` and `tokenizer` are ignored.

    Raises:
        ConfigError: no log-normal distribution has such a mean and such a percentile.
    """
    options = read_options(Config, config, where="rollout.engine")
    if not options.length_mean <= options.length_p99 <= options.length_mean * math.exp(P99**2 / 2):
        raise ConfigError(
            f"rollout.engine.length_p99 {options.length_p99:g}: want 1 to 15 times the mean"
            f" ({options.length_mean:g})"
        )
    return PacedEngine(options, slots=slots)


class PacedEngine(echo.EchoEngine):
    """Satisfies `meshrl.contract.ports.Engine`. Its tokens are those of the prompt, repeated."""

    def __init__(self, pace: Config, *, slots: int) -> None:
        of_one = pace.tokens_per_s / slots
        super().__init__(echo.Config(tokens_per_s=of_one), slots=slots)
        self._pace = pace
        self._lengths = Lengths(
            mean=pace.length_mean, p99=pace.length_p99, most=MOST_TOKENS, alike=pace.alike
        )

    async def start(self) -> None:
        """Accept requests."""
        pace = self._pace
        self._gpu = PacedGpu(
            slots=self._slots, tokens_per_s=pace.tokens_per_s, alone_speedup=pace.alone_speedup
        )
        await super().start()

    async def commit_weights(self, version: Version, on_update: OnUpdate) -> None:
        """As the echo engine, and stand still for `commit_s`."""
        await super().commit_weights(version, on_update)
        if self._pace.commit_s:
            self._gpu.pause(True)
            await asyncio.sleep(self._pace.commit_s)
            self._gpu.pause(False)

    async def _emit(self, request: GenerateRequest, push: echo.Push) -> None:
        prompt = request.prompt_ids[: len(request.prompt_ids) - request.continued]
        whole = self._lengths.draw(
            0, zlib.crc32(prompt.tobytes()), zlib.crc32(request.request_id.encode())
        )
        await self._respond(request, push, whole, self._pace.tokens_per_delta)

    async def _sample(self, tokens: int) -> None:
        sampled = asyncio.Event()
        self._gpu.sample(tokens, sampled.set)
        await sampled.wait()
