"""What the parts of this room ask of each other, beyond the contract's ports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, runtime_checkable

from meshrl.contract.nouns import GenerateDelta, GenerateRequest, Version


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
class TogetherEngine(Protocol):
    """An engine that can start several requests at one step: what deterministic runs need."""

    def generate_together(
        self, requests: Sequence[GenerateRequest]
    ) -> Sequence[AsyncIterator[GenerateDelta]]:
        """One stream per request. Equal requests in equal order, on an idle engine, give equal bits."""
        ...
