"""The port of the gateway: the endpoint through which agents reach the sessions of a worker."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from meshrl.rollout.sessions.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """What a client of the `openai` package needs to reach a session."""

    base_url: str
    api_key: str


class Gateway(Protocol):
    """Implemented by `meshrl.http.gateway`."""

    @property
    def prompt_tokens(self) -> int | None:
        """The longest prompt that a row of the run may have; None: any that fits the engine."""
        ...

    def opened(self, session: Session) -> AbstractContextManager[Address]:
        """Accept requests for `session` during the context."""
        ...

    def hand_over(self, session: Session, address: Address) -> bool:
        """Give an open session to the external agent that has waited longest; False when none waits."""
        ...

    @property
    def demand(self) -> int:
        """How many external agents wait for a session."""
        ...
