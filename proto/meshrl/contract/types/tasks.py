"""A prompt to be answered, and how to sample its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshrl.contract.types.names import Int32, Json


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
    greedy_siblings: int = 0
    """How many of the last rows of a group are sampled greedily instead: baselines (ReMax)."""

    def of_row(self, index: int, group_size: int) -> SamplingParams:
        """How row `index` of a group of `group_size` is sampled."""
        if index < group_size - self.greedy_siblings:
            return self
        return replace(self, temperature=0.0)


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
    packed: bytes = field(default=b"", init=False, repr=False, compare=False)
    """The bytes in which it came, where it came in a call of `admit`: the queue stores them as they are."""

    def came_as(self, data: bytes) -> Task:
        """This task, which was read from `data`."""
        object.__setattr__(self, "packed", data)
        return self


@dataclass(frozen=True)
class PackedTask:
    """A task in the bytes in which it is stored and sent, taken apart when somebody first looks into it."""

    data: bytes
    unpack: Callable[[bytes], Task] = field(repr=False, compare=False)

    @cached_property
    def task(self) -> Task:
        """Raises CorruptError."""
        return self.unpack(self.data)
