"""Configuration of rollout: what a recipe says under `rollout`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from meshrl.contract.config import Config
from meshrl.contract.types import OnUpdate, SamplingParams


def _positive_or_all(top_k: int) -> int:
    if top_k == 0 or top_k < -1:
        raise ValueError("want a positive number, or -1 for all tokens")
    return top_k


def _no_empty_string(stop: list[str]) -> list[str]:
    if "" in stop:
        raise ValueError("an empty stop string would stop everything at once")
    return stop


TopK = Annotated[int, AfterValidator(_positive_or_all)]
TopP = Annotated[float, Field(gt=0, le=1)]
StopList = Annotated[list[str], AfterValidator(_no_empty_string)]


class ValKwargs(Config):
    """How held-out tasks are sampled."""

    n: PositiveInt = 1
    """Samples per held-out prompt."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""
    top_p: TopP = 1.0
    top_k: TopK = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIntervals:
    """How often running responses are kept in the queue, for whoever takes over from a worker that dies or drains."""

    tokens: int = 64
    """0: the number of tokens does not matter."""
    ms: int = 1000
    """0: time does not matter. Both 0: nothing is kept."""


class CircuitBreakerConfig(Config):
    """When a worker whose engine fails stops leasing rows. Deterministic runs have no breaker."""

    error_rate: float = Field(default=0.5, gt=0.0, le=1.0)
    """Share of the last `window` requests that failed at which the worker leases nothing for a pause."""
    window: int = Field(default=20, ge=2)
    """Requests that the rate is of; a quarter of it must have ended before anything is concluded."""
    pause_s: PositiveFloat = 0.5
    """The first pause. One row is tried after each; while that fails, the next pause is twice as long."""
    longest_pause_s: PositiveFloat = 30.0
    """No pause is longer."""


class GatewayConfig(Config):
    """The endpoint of a worker whose program lets agents of other makes lead the conversation (`openai`)."""

    host: str = "127.0.0.1"
    """Where to listen; another address only for agents from outside, with `tokens` or client certificates."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 picks a free one, which `<run.dir>/gateways/<worker>.json` tells; else worker `rollout-3` has this plus 3."""
    tokens: Path | None = None
    """A YAML file of tokens as for `reward.registry.tokens`: who has the role `claim` may ask for sessions. Null:
    anybody who reaches the door may, which is refused beyond loopback."""
    max_request_bytes: PositiveInt = 8 << 20
    """Of one request."""
    max_connections: PositiveInt = 4096
    """At once; further ones are told 503."""
    claims_per_minute: PositiveFloat = 6000.0
    """Of one caller."""


class RolloutConfig(Config):
    """From tasks to trajectories."""

    name: str = "torch"
    """A module of `meshrl.rollout.engines`, or a dotted path."""
    n: PositiveInt = 8
    """Samples per prompt: the size of a group."""
    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    top_p: TopP = 1.0
    """Smallest set of tokens with this probability; 1 keeps all."""
    top_k: TopK = -1
    """The k likeliest tokens; -1 keeps all."""
    stop: StopList = Field(default_factory=list)
    """A response ends once its text has one of these; the tokens that complete it stay in the response."""
    program: str = "single_turn"
    """A module of `meshrl.rollout.programs`, or a dotted path."""
    program_options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of the program: the `Config` in its module."""
    gateway: GatewayConfig = GatewayConfig()
    """The endpoint of each worker, for programs that have one."""
    workers: PositiveInt = 1
    """Processes, each with an engine of its own."""
    slots: PositiveInt = 64
    """Requests that one worker runs at once."""
    on_update: OnUpdate = OnUpdate.IN_FLIGHT
    """What running requests do when new weights arrive: drain, interrupt (recompute the cache) or in_flight."""
    deadline_s: PositiveFloat = 600.0
    """One rollout may take this long before it counts as `timeout`."""
    journal_tokens: NonNegativeInt = CheckpointIntervals().tokens
    """Running responses are kept in the queue, so that at most so many tokens of each are sampled again when a worker
    has died (an append starts at half of it); 0: only `journal_ms` counts. Deterministic runs keep nothing."""
    journal_ms: NonNegativeInt = CheckpointIntervals().ms
    """No token waits longer to be kept, however slow the engine; 0: only `journal_tokens` counts. Both 0: nothing is
    kept, and the row of a dead worker begins anew."""
    breaker: CircuitBreakerConfig = CircuitBreakerConfig()
    """The circuit breaker of each worker."""
    deterministic: bool | None = None
    """Rows in waves whose bits do not depend on timing; None: exactly when `queue.max_staleness` is 0."""
    engine: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of the engine: the `Config` in its module."""
    val_kwargs: ValKwargs = ValKwargs()

    def is_deterministic(self, max_staleness: float) -> bool:
        """Whether rows run in sync batches: as configured, else exactly when training is on-policy."""
        return max_staleness == 0 if self.deterministic is None else self.deterministic

    @property
    def checkpoint_intervals(self) -> CheckpointIntervals:
        """The two intervals."""
        return CheckpointIntervals(tokens=self.journal_tokens, ms=self.journal_ms)

    def sampling(self, *, max_tokens: int, seed: int) -> SamplingParams:
        """How training tasks are sampled."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=max_tokens,
            stop=tuple(self.stop),
            seed=seed,
        )

    def val_sampling(self, *, max_tokens: int, seed: int) -> SamplingParams:
        """How held-out tasks are sampled."""
        return SamplingParams(
            temperature=self.val_kwargs.temperature,
            top_p=self.val_kwargs.top_p,
            top_k=self.val_kwargs.top_k,
            max_tokens=max_tokens,
            stop=tuple(self.stop),
            seed=seed,
        )
