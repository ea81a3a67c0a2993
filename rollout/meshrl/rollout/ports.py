"""What the parts of this room ask of each other, beyond the contract's ports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from meshrl.contract.types import (
    Columns,
    GenerateDelta,
    GenerateRequest,
    Int32,
    Outcome,
    Task,
    Trajectory,
    Uid,
    Version,
)
from meshrl.rollout.tokenizer import Tokenizer

if TYPE_CHECKING:
    from meshrl.rollout.sessions.session import Session


class Generator(Protocol):
    """The half of an engine that a program may use."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """See `meshrl.contract.ports.Engine.generate`."""
        ...

    @property
    def version(self) -> Version:
        """The version that samples the next token."""
        ...


@runtime_checkable
class Replaying(Generator, Protocol):
    """A generator for a row that somebody else has worked on before."""

    def observed(self, tokens: Int32) -> Int32:
        """int32[k]: what the environment said then, after `tokens` int32[T]; empty where nothing is known."""
        ...


@runtime_checkable
class TogetherEngine(Generator, Protocol):
    """An engine that can start several requests at one step: what deterministic runs need."""

    def generate_together(
        self, requests: Sequence[GenerateRequest]
    ) -> Sequence[AsyncIterator[GenerateDelta]]:
        """One stream per request. Equal requests in equal order, on an idle engine, give equal bits."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What a program hands back: a trajectory and how it came to its end."""

    trajectory: Trajectory
    outcome: Outcome
    finish_reason: str
    columns: Columns = field(default_factory=dict)
    """Further columns, where the run's rollout stage has them."""


class GiveBackError(Exception):
    """A program's word that it has not begun, through no fault of its row: the row goes back as if never leased."""


class Program(Protocol):
    """How a task becomes a trajectory: the `run` of a module in `meshrl.rollout.programs`, or what its `build` makes.

    A program asks the engine for tokens (`meshrl.rollout.sampling.sample`), may do other things between two
    requests (call a tool, play a turn), and joins everything to one row: `tokens` in order, `loss_mask` 1 exactly
    where the policy sampled, log-probs and version spans as the engine gave them, never re-tokenised text. Its
    request ids begin with the uid, so that draws are the row's own. It knows no leases, no deadline and no queue:
    the worker cancels it. Its row is kept while it runs, where the id of its first request is `str(uid)` and each
    further prompt is all that was asked and sampled before, and something new: after the death of a worker the
    program runs again, and the same requests are answered from what was kept (`Replaying`). What a program raises
    becomes an infrastructure fault; a policy that misbehaves is an outcome, not an exception. In a wave it
    asks for one response at a time.
    """

    async def __call__(
        self, task: Task, uid: Uid, engine: Generator, tokenizer: Tokenizer
    ) -> Rollout:
        """Produce the trajectory `uid` of `task`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """What a client of the `openai` package needs to reach a session."""

    base_url: str
    api_key: str


class Gateway(Protocol):
    """The door through which agents reach the sessions of a worker."""

    @property
    def prompt_tokens(self) -> int | None:
        """The longest prompt that a row of the run may have; None: any that fits the engine."""
        ...

    def opened(self, session: Session) -> AbstractContextManager[Address]:
        """Let requests through to `session` while the context lasts."""
        ...

    def hand_over(self, session: Session, address: Address) -> bool:
        """Give an open session to whoever has waited longest for one from outside; False when nobody waits."""
        ...

    @property
    def demand(self) -> int:
        """How many wait for a session."""
        ...
