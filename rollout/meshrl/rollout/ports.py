"""Ports and types that the parts of this package share, beyond those of the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from meshrl.contract.stage_worker import StageStats
from meshrl.contract.types import (
    Columns,
    GenerateDelta,
    GenerateRequest,
    Int32,
    Media,
    Outcome,
    Task,
    Trajectory,
    Uid,
    Version,
)
from meshrl.rollout.tokenizer import Tokenizer

UNSERVED = Version(0, 0)
"""The version of an engine before its first commit; a trainer's epochs begin at 1, so it is never published."""
NO_BREAKER = "none"
"""`WorkerReport.breaker` of deterministic runs."""


class Generator(Protocol):
    """The part of an engine that a program may use."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Sample one response, as an engine does."""
        ...

    @property
    def version(self) -> Version:
        """The version that samples the next token."""
        ...


@runtime_checkable
class Replaying(Generator, Protocol):
    """A generator for a row that another worker has begun."""

    def observed(self, tokens: Int32) -> Int32:
        """int32[k]: the observation that followed `tokens` int32[T] then; empty where none is recorded."""
        ...


@runtime_checkable
class TogetherEngine(Generator, Protocol):
    """An engine that can start several requests at the same decode step, as deterministic runs need."""

    def generate_together(
        self, requests: Sequence[GenerateRequest]
    ) -> Sequence[AsyncIterator[GenerateDelta]]:
        """One stream per request. Equal requests in equal order, on an idle engine, give equal bits."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The result of a program: a trajectory, and how it ended."""

    trajectory: Trajectory
    outcome: Outcome
    finish_reason: str
    columns: Columns = field(default_factory=dict)
    """Additional columns, where the run's rollout stage has them."""
    messages: Sequence[Mapping[str, Any]] = ()
    """Messages after the prompt of a row of several turns, in the form of OpenAI's API, for people who read the
    row."""
    media: tuple[Media, ...] | None = None
    """The row's pictures in the order of their places; None: those of its task."""


class GiveBackError(Exception):
    """Raised by a program that has not begun, through no fault of its row: the row is returned as if never leased."""


class Program(Protocol):
    """How a task becomes a trajectory: the `run` of a module in `meshrl.rollout.programs`, or what its `build` makes.

    A program requests tokens from the engine (`meshrl.rollout.streams.sample`), may do other things between two
    requests (call a tool, play a turn), and joins everything to one row: `tokens` in order, `loss_mask` 1 exactly
    where the policy sampled, log-probs and version spans as the engine gave them, never re-tokenised text. Its
    request ids begin with the uid, so that draws are specific to the row. It needs to know nothing of leases,
    deadlines or the queue: the worker cancels it. Checkpoints of the row are kept while it runs, if the id of its
    first request is `str(uid)` and each further prompt is everything requested and sampled before, plus something
    new: after the death of a worker the program runs again, and the same requests are answered from the checkpoint
    (`Replaying`). An exception of a program becomes an infrastructure fault; a policy that misbehaves is an outcome,
    not an exception. In a sync batch a program sends one request at a time.
    """

    async def __call__(
        self, task: Task, uid: Uid, engine: Generator, tokenizer: Tokenizer
    ) -> Rollout:
        """Produce the trajectory `uid` of `task`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """The state of one worker at one moment."""

    held: int
    """Rows held now."""
    slots: int
    """The most rows that it may hold."""
    rows: StageStats
    """Since the start."""
    breaker: str
    """State of the circuit breaker: closed, open, half_open or none."""
    error_rate: float
    """Share of the last requests to the engine that failed."""
    last_fault: str
    """Empty before the first."""
    opened: int
    """How often the circuit breaker has opened."""
    continued: int
    """Tokens of responses that this worker continued after another worker."""
    draining: bool
    """Whether it has stopped leasing rows."""
    boxes: int = 0
    """Containers of its rows that run."""
    waits_for: str = ""
    """The image that its rows wait for; empty where none does."""
