"""Reads one response from a server's stream: where it ends, which version sampled which token."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from meshrl.contract.errors import InfraError
from meshrl.contract.routed_experts import Experts, narrow
from meshrl.contract.types import GenerateDelta, PromptLogprobs, Version
from meshrl.rollout.end_tokens import StopStrings


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The content of one event of a generate stream."""

    tokens: Sequence[int]
    """New tokens: those that no earlier chunk had."""
    logprobs: Sequence[float]
    finish_reason: str
    """Empty while running."""
    spans: Sequence[tuple[str, int, int]] | None
    """(version label, start, end) over the whole response, from the server's record of its steps; last chunk only."""
    experts: npt.NDArray[Any] | None = None
    """[n, L, K]: experts of tokens from the first wanted one on; last chunk only, and where they are wanted."""
    prompt: PromptLogprobs | None = None
    """A chunk of its own, where they are wanted."""


def told_prompt(tokens: Sequence[int], places: Sequence[Mapping[int, float]], top: int) -> Chunk:
    """The chunk of a server's answer about a prompt.

    Args:
        tokens: Of the prompt, P of them.
        places: Log-probs of tokens at each place but the first, by token: of its own, and of the likeliest.
        top: Number of the likeliest that are wanted.

    Raises:
        InfraError: some are missing.
    """
    logprobs = np.full(len(tokens), np.nan, np.float32)
    top_ids = np.zeros((len(tokens), top), np.int32)
    top_logprobs = np.full((len(tokens), top), np.nan, np.float32)
    if len(places) != len(tokens) - 1:
        raise InfraError(f"the server returned log-probs of {len(places)} of {len(tokens)} tokens")
    for at, (token, found) in enumerate(zip(tokens[1:], places, strict=True), 1):
        likeliest = sorted(found, key=lambda each: -found[each])[:top]
        if token not in found or len(likeliest) < top:
            raise InfraError(
                f"the server returned {len(found)} log-probs at token {at} of a prompt"
            )
        logprobs[at] = found[token]
        top_ids[at] = likeliest
        top_logprobs[at] = [found[each] for each in likeliest]
    prompt = PromptLogprobs(logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)
    return Chunk(tokens=(), logprobs=(), finish_reason="", spans=None, prompt=prompt)


class ResponseReader:
    """Turns chunks into deltas.

    A server says which version sampled which token with the last chunk of a response only. Tokens that arrive before
    an update has begun were certainly sampled by the version that the request started with, and are delivered at
    once; tokens that arrive later may belong to either version, and wait for the last chunk.
    """

    def __init__(
        self,
        version: Version,
        stop_strings: StopStrings | None,
        before: Sequence[int] = (),
        stop_token_ids: Collection[int] = (),
        *,
        experts_of: int | None = None,
    ) -> None:
        """Begin.

        Args:
            version: Version that the server serves when the request starts.
            stop_strings: Those of the request.
            before: Response tokens that a continued request begins with (sampled earlier).
            stop_token_ids: Those of the request.
            experts_of: How many tokens of the prompt have experts that are wanted; None: those of the response are
                not either.
        """
        self._prompt: PromptLogprobs | None = None
        """Sent with the last delta."""
        self._experts_of = experts_of
        self._version = version
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stop_strings = stop_strings
        self._response = list(before)
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._sent = 0
        self._stopped = False

    def add(self, chunk: Chunk) -> int:
        """Add a chunk; returns how many of its tokens belong to the response.

        After a stop none does: the server keeps sampling until the abort reaches it.
        """
        self._prompt = chunk.prompt or self._prompt
        before = len(self._tokens)
        for token, logprob in zip(chunk.tokens, chunk.logprobs, strict=True):
            if self._stopped:
                break
            self._tokens.append(token)
            self._logprobs.append(logprob)
            self._stopped = token in self._stop_token_ids
            if self._stop_strings is not None:
                self._response.append(token)
                self._stopped |= self._stop_strings.completed_by(self._response)
        return len(self._tokens) - before

    @property
    def stopped(self) -> bool:
        """A stop token has arrived, or a stop string is complete: later tokens do not belong to the response."""
        return self._stopped

    def certain(self) -> GenerateDelta | None:
        """Tokens not delivered yet, or None. Call it only while no update has begun since the request started."""
        if self._sent == len(self._tokens):
            return None
        return self._deliver(len(self._tokens), self._version, "")

    def rest(self, last: Chunk) -> Sequence[GenerateDelta]:
        """All tokens not delivered yet, split where the version changed; the last delta has the finish reason.

        Raises:
            InfraError: the server does not say which version sampled the tokens, or names one that the mesh did not
            load;
                or the server ended the request itself, or tells too few experts.
        """
        reason = "stop" if self._stopped else last.finish_reason
        if reason not in ("stop", "length"):
            raise InfraError(f"the server ended a request by itself: {reason}")
        deltas = []
        for label, start, end in self._spans(last):
            version = _version(label)
            if start < self._sent and version != self._version:
                raise InfraError(
                    f"tokens {start} to {min(end, self._sent)} were sampled by {label!r}, the server was left at "
                    f"{self._version}: another program changes its weights"
                )
            end = min(end, len(self._tokens))
            if end > self._sent:
                deltas.append(self._deliver(end, version, ""))
        if self._sent != len(self._tokens):
            raise InfraError(
                f"the server says which version sampled {self._sent} of {len(self._tokens)} tokens"
            )
        final = self._deliver(self._sent, self._version, reason)
        deltas.append(dataclasses.replace(final, experts=self._experts(last), prompt=self._prompt))
        return deltas

    def _experts(self, last: Chunk) -> Experts | None:
        """Experts of all tokens that were fed, less those that the server fed after a stop that it does not know."""
        if self._experts_of is None or not self._tokens:
            return None
        fed = self._experts_of + len(self._tokens) - 1
        told = 0 if last.experts is None else len(last.experts)
        if last.experts is None or told < fed:
            raise InfraError(
                f"the server returned the experts of {told} of {fed} tokens; it needs --enable-return-routed-experts"
            )
        return narrow(last.experts[:fed])

    def _spans(self, last: Chunk) -> Sequence[tuple[str, int, int]]:
        if last.spans is None and self._tokens:
            raise InfraError("the server does not say which weights sampled the tokens")
        return last.spans or ()

    def _deliver(self, end: int, version: Version, reason: str) -> GenerateDelta:
        start, self._sent = self._sent, end
        return GenerateDelta(
            tokens=np.array(self._tokens[start:end], dtype=np.int32),
            logprobs=np.array(self._logprobs[start:end], dtype=np.float32),
            version=version,
            finish_reason=reason,
        )


def end_delta(version: Version, reason: str) -> GenerateDelta:
    """A last delta without tokens."""
    return GenerateDelta(
        tokens=np.empty(0, dtype=np.int32),
        logprobs=np.empty(0, dtype=np.float32),
        version=version,
        finish_reason=reason,
    )


def _version(label: str) -> Version:
    try:
        return Version.parse(label)
    except ValueError as error:
        raise InfraError(
            f"tokens were sampled by {label!r}, which the mesh did not load"
        ) from error
