"""Requests to an engine, the deltas that it streams back, and how it takes new weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshrl.contract.routed_experts import Experts
from meshrl.contract.types.rows import Float32, Int32, Media, SamplingParams, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One response to be sampled by an engine."""

    request_id: str
    prompt_ids: Int32
    """int32[P]"""
    sampling: SamplingParams
    media: tuple[Media, ...] = ()
    """Its pictures, in the order of their places in `prompt_ids`."""
    media_starts: tuple[int, ...] = ()
    """Where the last of them begin, those that were observed between turns; the others stand in the first places for
    pictures that `prompt_ids` have."""
    continued: int = 0
    """How many of the last `prompt_ids` belong to the response itself, sampled before: draws and stop strings
    continue from there. `sampling.max_tokens` counts what may still come, and may be 0 here: a response that has
    ended already is
    answered with its finish reason alone."""
    experts_from: int | None = None
    """The experts of the tokens from this place of the prompt on are wanted; None: none are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateDelta:
    """Tokens sampled since the last delta, all by one `version`."""

    tokens: Int32
    """int32[k]"""
    logprobs: Float32
    """float32[k]: under the actual sampling distribution (after temperature, top-k and top-p)."""
    version: Version
    finish_reason: str = ""
    """Empty while running; then `stop`, `length` or `abort`."""
    experts: Experts | None = None
    """[n, L, K], where they are wanted: of the next n tokens that were fed and of which no earlier delta told. The
    deltas of a response tell of all tokens but its last one, which never was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What a scheduler must know of an engine."""

    version: Version
    running: int
    capacity: int
    """Requests that may run at once."""
    tokens_generated: int
    tokens_per_s: float
    updates: int
    update_pause_s: float
    """How long the last weight update held generation up."""
    staging: str = ""
    """Where the last version waited for its commit: device or host; empty: not known."""


class OnUpdate(StrEnum):
    """What a running generation does when new weights arrive."""

    DRAIN = "drain"
    """Finish running requests under the old weights, start none, then update."""
    INTERRUPT = "interrupt"
    """Stop between two decode steps, update, recompute the KV cache under the new weights, go on."""
    IN_FLIGHT = "in_flight"
    """Stop between two decode steps, update, go on with the KV cache as it is."""
