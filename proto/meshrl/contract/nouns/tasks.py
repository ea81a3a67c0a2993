"""A prompt to be answered, and how to sample its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshrl.contract.nouns.names import Int32, Json


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one response. `temperature == 0` is greedy; `top_k == -1` and `top_p == 1` are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    """Mixed with the uid of the row, so that a row's draws depend on nothing that runs beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message of a prompt."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt to be answered `group_size` times."""

    run: str
    task_id: str
    prompt_ids: Int32
    """int32[P], chat template applied."""
    messages: tuple[Message, ...] = ()
    data_source: str = ""
    ground_truth: Json = None
    extra_info: Mapping[str, Json] = field(default_factory=dict)
    program: str = "single_turn"
    sampling: SamplingParams = field(default_factory=SamplingParams)
    group_size: int = 1
    deadline_s: float = 600.0
    """Seconds one rollout of this task may take before it counts as `timeout`."""
    priority: int = 0
