"""Which experts the tokens of a row went to, gathered from the requests that its program sends.

    program ──request──▶ ExpertRecorder ──and the experts of what is new──▶ engine
            ◀──deltas───       │ prompt + response, experts
                               ▼
                        column(trajectory): each token's experts, as they were when the row's log-probs were made

The prompt of a later turn is computed again, perhaps by other weights: its tokens keep the experts that they had in
their own turn.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from meshrl.contract.errors import InfraError
from meshrl.contract.routed_experts import Experts, RoutedExperts
from meshrl.contract.types import GenerateDelta, GenerateRequest, Int32, Version
from meshrl.rollout.ports import Generator
from meshrl.rollout.streams import closing


@dataclass(frozen=True, slots=True, eq=False)
class _Sequence:
    """A prompt with its response, and the experts of its first tokens."""

    tokens: Int32
    experts: npt.NDArray[Any]
    """[n, L, K], n at most the number of tokens."""

    def known(self, tokens: Int32) -> Experts:
        """[n, L, K]: of the first `tokens`, as far as they are these and known."""
        shorter = min(len(self.experts), len(tokens))
        different = np.flatnonzero(self.tokens[:shorter] != tokens[:shorter])
        found: Experts = self.experts[: different[0] if len(different) else shorter]
        return found


class ExpertRecorder:
    """A `Generator` for one row."""

    def __init__(self, engine: Generator) -> None:
        self._engine = engine
        self._sequences: list[_Sequence] = []

    @property
    def version(self) -> Version:
        """The version that samples the next token."""
        return self._engine.version

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Sample one response; its deltas have no experts. Raises InfraError where the engine tells of none."""
        prompt = request.prompt_ids
        known = self._known(prompt)
        tokens, experts = [prompt], [known]
        asked = replace(request, experts_from=len(known))
        try:
            async with closing(self._engine.generate(asked)) as stream:
                async for delta in stream:
                    tokens.append(delta.tokens)
                    if delta.experts is not None:
                        experts.append(delta.experts)
                    yield replace(delta, experts=None)
        finally:
            self._keep(np.concatenate(tokens), [part for part in experts if part.size])
        fed, told = sum(map(len, tokens)) - 1, sum(map(len, experts))
        if fed >= len(prompt) and told != fed and delta.finish_reason != "abort":
            raise InfraError(
                f"request {request.request_id}: the engine tells the experts of {told} of {fed} tokens"
            )

    def column(self, tokens: Int32, starts: Sequence[int] = (0,)) -> RoutedExperts:
        """Of every token of a row, whose parts begin at `starts`.

        None is known of tokens that no request had, and of the last one of a part.
        """
        found = [
            (start, self._known(tokens[start:end]))
            for start, end in itertools.pairwise([*starts, len(tokens)])
        ]
        shape = max(part.shape[1:] for _, part in found)
        experts = np.zeros((len(tokens), *shape), np.result_type(*(part for _, part in found)))
        for start, part in found:
            if part.size:
                experts[start : start + len(part)] = part
        return RoutedExperts.pack(experts)

    def _known(self, tokens: Int32) -> Experts:
        none = np.zeros((0, 0, 0), np.uint8)
        return max([none, *(each.known(tokens) for each in self._sequences)], key=len)

    def _keep(self, tokens: Int32, experts: list[Experts]) -> None:
        if not experts:
            return
        made = _Sequence(tokens, np.concatenate(experts))
        # A sequence that goes on in this one has nothing to add.
        others = [s for s in self._sequences if len(made.known(s.tokens)) < len(s.experts)]
        self._sequences = [*others, made]
