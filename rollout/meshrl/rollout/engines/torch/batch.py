"""The running requests as one dense batch: join, decode one token each, leave. Knows no threads and no asyncio.

waiting ──admit (prefill, first token)──▶ rows 0 … n-1 ──step (one token each)──▶ … ──▶ finished
                                             ▲                                           │
                                             └───────── the last row fills the gap ◀─────┘
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from meshrl.contract.errors import InfraError, MeshError
from meshrl.contract.routed_experts import Experts
from meshrl.contract.types import (
    GenerateDelta,
    GenerateRequest,
    Int32,
    PromptLogprobs,
    Version,
)
from meshrl.rollout.end_tokens import StopStrings
from meshrl.rollout.engines.torch.forward import KvCache, TorchDecoder
from meshrl.rollout.engines.torch.graphs import StaticSteps
from meshrl.rollout.engines.torch.sampler import SamplingRows
from meshrl.rollout.engines.torch.weights import Weights

TOLD_AT_ONCE = 256
"""Tokens of a prompt whose log-probs are computed together: of each there are logits over the vocabulary."""


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeRow:
    """One request while it runs."""

    request: GenerateRequest
    deliver: Callable[[GenerateDelta | MeshError], None]
    """Called on the consumer's event loop, in order."""
    limit: int
    """Response tokens at most, those before included."""
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None
    tokens: list[int] = field(default_factory=list)
    """The response so far; a continued one begins with what was sampled before."""
    fresh_logprobs: list[float] = field(default_factory=list)
    """Log-probs of the last tokens, which have not been delivered yet."""
    fresh_experts: list[Experts] = field(default_factory=list)
    """[n, L, k] each: of tokens that were fed, where they are wanted and not delivered yet."""
    fresh_prompt: PromptLogprobs | None = None
    finish_reason: str = ""
    error: InfraError | None = None

    def __post_init__(self) -> None:
        if self.tokens:
            self._ends()

    @property
    def done(self) -> bool:
        """Whether sampling has ended."""
        return bool(self.finish_reason) or self.error is not None

    @property
    def sampled(self) -> list[int]:
        """Response tokens that were sampled here."""
        return self.tokens[self.request.continued :]

    @property
    def tells_experts(self) -> bool:
        """The request wants them."""
        return self.request.experts_from is not None

    @property
    def longest(self) -> int:
        """Positions the row may come to hold."""
        return len(self.request.prompt_ids) - self.request.continued + self.limit

    def take_fresh(self, version: Version) -> GenerateDelta:
        """Tokens sampled since the last call, all by `version`."""
        fresh = len(self.fresh_logprobs)
        delta = GenerateDelta(
            tokens=np.array(self.tokens[len(self.tokens) - fresh :], dtype=np.int32),
            logprobs=np.array(self.fresh_logprobs, dtype=np.float32),
            version=version,
            finish_reason=self.finish_reason,
            experts=np.concatenate(self.fresh_experts) if self.fresh_experts else None,
            prompt=self.fresh_prompt,
        )
        self.fresh_logprobs, self.fresh_experts, self.fresh_prompt = [], [], None
        return delta

    def accept(self, token: int, logprob: float) -> bool:
        """Take a sampled token; True when it is the last."""
        if not math.isfinite(logprob):
            self.error = InfraError(
                f"the model's logits are not finite at response token {len(self.tokens)} of "
                f"{self.request.request_id}"
            )
            return True
        self.tokens.append(token)
        self.fresh_logprobs.append(logprob)
        return self._ends()

    def _ends(self) -> bool:
        if self.tokens[-1] in self.stop_ids or (
            self.stop_strings is not None and self.stop_strings.completed_by(self.tokens)
        ):
            self.finish_reason = "stop"
            return True
        if len(self.tokens) >= self.limit:
            self.finish_reason = "length"
            return True
        return False


class DecodeBatch:
    """Row `i` of the cache, of the sampling parameters and of `rows` belong together."""

    def __init__(
        self,
        decoder: TorchDecoder,
        cache: KvCache,
        *,
        slots: int,
        max_prefill_tokens: int,
        static_steps: StaticSteps | None = None,
    ) -> None:
        self.rows: list[DecodeRow] = []
        self._static_steps = static_steps
        self._decoder = decoder
        self._cache = cache
        self._slots = slots
        self._max_prefill_tokens = max_prefill_tokens
        self._sampling = SamplingRows(slots)
        self._last = np.zeros(slots, dtype=np.int64)
        self._stored = np.zeros(slots, dtype=np.int64)
        """Positions in the cache: all but the last sampled token."""
        self._sampled = np.zeros(slots, dtype=np.int64)
        self._longest_of = np.zeros(slots, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def device(self) -> torch.device:
        """Device of the decoder."""
        return self._decoder.device

    def admit(self, weights: Weights, waiting: deque[DecodeRow]) -> list[DecodeRow]:
        """Start the longest prefix of `waiting` that fits, all prompts together; returns the rows already done."""
        joining: list[DecodeRow] = []
        longest = self._longest()
        while waiting and len(self.rows) + len(joining) < self._slots:
            longest = max(longest, waiting[0].longest)
            if not self._cache.fits(len(self.rows) + len(joining) + 1, longest):
                break
            joining.append(waiting.popleft())
        if not joining:
            return []
        # By length, so that little is padded; the sort is stable, so siblings stay together.
        joining.sort(key=lambda row: len(row.request.prompt_ids))
        first = len(self.rows)
        for index, row in enumerate(joining, start=first):
            self._enter(index, row)
        self.rows += joining
        logits = self._fill(weights, [row.request.prompt_ids for row in joining], first, joining)
        return self._sample(logits, first)

    def step(self, weights: Weights) -> list[DecodeRow]:
        """Sample one token for every row; returns the rows that are done and have left."""
        count = len(self.rows)
        if not count:
            return []
        width = self._reserve(kept=count)
        if self._static_steps is not None:
            fed = self._last[:count], self._stored[:count]
            drawn = self._static_steps.step(
                weights, width, *fed, self._sampling, self._sampled[:count]
            )
            self._stored[:count] += 1
            return self._accept(slice(0, count), *drawn)
        device = self._decoder.device
        taken = self._decoder.no_experts(count) if self._tells(self.rows) else None
        logits = self._decoder.decode(
            weights,
            self._cache,
            torch.from_numpy(self._last[:count]).to(device),
            torch.from_numpy(self._stored[:count]).to(device),
            taken,
        )
        self._stored[:count] += 1
        if taken is not None:
            for row, experts in zip(self.rows, _numbers(taken), strict=True):
                if row.tells_experts:
                    row.fresh_experts.append(experts[None])
        return self._sample(logits, 0)

    def recompute(self, weights: Weights) -> None:
        """Recompute the cache under other weights; the next step continues from there."""
        if self.rows:
            prefixes = [
                np.concatenate([row.request.prompt_ids, np.array(row.sampled[:-1], dtype=np.int32)])
                for row in self.rows
            ]
            self._fill(weights, prefixes, 0)

    def release_cache(self) -> None:
        """Free the memory of the cache; `recompute` fills it again, before the next step."""
        self._cache.release()
        if self._static_steps is not None:
            self._static_steps.forget()

    def remove(self, leaving: Sequence[DecodeRow]) -> None:
        """Free the rows of `leaving`; those that do not run are ignored."""
        gone = {id(row) for row in leaving}
        for index in reversed(range(len(self.rows))):
            if id(self.rows[index]) in gone:
                self._leave(index)

    def _reserve(self, *, kept: int) -> int:
        """Make space for the next token of every row; the first `kept` rows are in the cache already.

        Returns:
            How many rows the next step computes.
        """
        width = len(self.rows)
        length = int(self._stored[:width].max()) + 1
        if self._static_steps is not None:
            width = self._static_steps.width(width, length)
        self._cache.reserve(width, length, kept=kept)
        return width

    def _longest(self) -> int:
        return int(self._longest_of[: len(self.rows)].max(initial=0))

    def _enter(self, index: int, row: DecodeRow) -> None:
        vocabulary = self._decoder.architecture.vocab_size
        self._sampling.enter(index, row.request, vocabulary, self.device)
        self._stored[index] = len(row.request.prompt_ids)
        self._sampled[index] = row.request.continued
        self._longest_of[index] = row.longest

    def _leave(self, index: int) -> None:
        """Move the last row into the gap."""
        if self.rows[index].error is not None:
            self._cache.clear(index)
        last = len(self.rows) - 1
        if index != last:
            self._cache.move(last, index, int(self._stored[last]))
            self._sampling.move(last, index)
            for column in (self._last, self._stored, self._sampled, self._longest_of):
                column[index] = column[last]
            self.rows[index] = self.rows[last]
        self.rows.pop()

    def _sample(self, logits: torch.Tensor, first: int) -> list[DecodeRow]:
        """Sample for the rows from `first` on."""
        rows = slice(first, len(self.rows))
        tokens, logprobs = self._sampling.sample(logits, rows, self._sampled[rows])
        return self._accept(rows, tokens.tolist(), logprobs.tolist())

    def _accept(self, rows: slice, tokens: list[int], logprobs: list[float]) -> list[DecodeRow]:
        """Give each of the rows its token; those that are done leave."""
        self._last[rows] = tokens
        self._sampled[rows] += 1
        done = [
            row
            for row, token, logprob in zip(self.rows[rows], tokens, logprobs, strict=True)
            if row.accept(token, logprob)
        ]
        if done:
            self.remove(done)
        return done

    @staticmethod
    def _tells(rows: Sequence[DecodeRow]) -> bool:
        return any(row.tells_experts for row in rows)

    def _fill(
        self,
        weights: Weights,
        prompts: Sequence[Int32],
        first: int,
        joining: Sequence[DecodeRow] = (),
    ) -> torch.Tensor:
        """Prefill rows `first …` in bounded chunks; equal prompts in a chunk are computed once.

        The rows that are `joining`, if they are, get to know the experts and log-probs of their prompts.

        Returns:
            [len(prompts), V]
        """
        self._reserve(kept=first)
        device = self._decoder.device
        pieces: list[torch.Tensor] = []
        for distinct, source in self._chunks(prompts):
            lengths = np.array([len(prompt) for prompt in distinct])
            padded = np.zeros((len(distinct), lengths.max()), dtype=np.int64)
            for line, prompt in zip(padded, distinct, strict=True):
                line[: len(prompt)] = prompt
            where = torch.tensor(source, device=device)
            told, joining = joining[: len(source)], joining[len(source) :]
            taken = self._decoder.no_experts(*padded.shape) if self._tells(told) else None
            asking = [
                (row, at)
                for row, at in zip(told, source[: len(told)], strict=True)
                if row.request.prompt_top is not None
            ]
            every: list[torch.Tensor] = []
            logits = self._decoder.prefill(
                weights,
                self._cache,
                torch.from_numpy(padded).to(device),
                torch.from_numpy(lengths).to(device),
                where,
                first,
                taken,
                every if asking else None,
            )
            for row, at in asking:
                row.fresh_prompt = self._told(weights, every[0][at], row.request)
            if taken is not None:
                numbers = _numbers(taken)
                for row, line in zip(told, source, strict=True):
                    if row.tells_experts:
                        wanted = slice(row.request.experts_from, len(row.request.prompt_ids))
                        row.fresh_experts.append(numbers[line, wanted])
            pieces.append(logits[where])
            first += len(source)
        return torch.cat(pieces)

    def _told(
        self, weights: Weights, hidden: torch.Tensor, request: GenerateRequest
    ) -> PromptLogprobs:
        """Log-probs of a prompt whose last states are `hidden`, [P, C]."""
        length, top = request.prompt_length, request.prompt_top or 0
        prompt = torch.from_numpy(request.prompt_ids.astype(np.int64)).to(self.device)
        logprobs = np.full(length, np.nan, np.float32)
        top_ids = np.zeros((length, top), np.int32)
        top_logprobs = np.full((length, top), np.nan, np.float32)
        for start in range(1, length, TOLD_AT_ONCE):
            places = slice(start, min(start + TOLD_AT_ONCE, length))
            logits = self._decoder.logits(weights, hidden[places.start - 1 : places.stop - 1])
            found = logits.float().log_softmax(-1)
            logprobs[places] = found.gather(-1, prompt[places, None])[:, 0].cpu().numpy()
            likeliest = found.topk(top)
            top_ids[places] = likeliest.indices.cpu().numpy()
            top_logprobs[places] = likeliest.values.cpu().numpy()
        return PromptLogprobs(logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)

    def _chunks(self, prompts: Sequence[Int32]) -> Iterator[tuple[list[Int32], list[int]]]:
        """Consecutive prompts as (distinct prompts, which of them each row takes)."""
        distinct: list[Int32] = []
        source: list[int] = []
        known: dict[bytes, int] = {}
        widest = 0
        for prompt in prompts:
            content = prompt.tobytes()
            if content not in known:
                widest = max(widest, len(prompt))
                if distinct and (len(distinct) + 1) * widest > self._max_prefill_tokens:
                    yield distinct, source
                    distinct, source, known, widest = [], [], {}, len(prompt)
                known[content] = len(distinct)
                distinct.append(prompt)
            source.append(known[content])
        yield distinct, source


def _numbers(taken: torch.Tensor) -> Experts:
    """On the host."""
    numbers: Experts = taken.cpu().numpy()
    return numbers if numbers.dtype == np.uint8 else numbers.view(np.uint16)
