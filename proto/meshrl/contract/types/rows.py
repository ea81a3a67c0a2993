"""Names and basic types (versions, uids, outcomes), and a task with one sampled answer to it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from meshrl.contract.routed_experts import RoutedExperts

Json: TypeAlias = Any
"""A value that `json.dumps` takes: the one `Any` of the contract."""
Int32: TypeAlias = npt.NDArray[np.int32]
Uint8: TypeAlias = npt.NDArray[np.uint8]
Float32: TypeAlias = npt.NDArray[np.float32]
Columns: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""Column name to array: the payload of one row, as the queue stores it."""


MOST_NAME = 256
"""Characters of a name."""


def name_fault(name: str, *, most: int = MOST_NAME) -> str:
    """Why nothing may be called so: it names another file, ends a log line or is no text. Empty for a good name."""
    if not name:
        return "it is empty"
    if len(name) > most:
        return f"it has {len(name)} characters (at most {most})"
    if not name.isprintable():
        return "it has a character that cannot be printed"
    if {"", ".", ".."} & set(name.split("/")):
        return "a part of it, between slashes, is empty, '.' or '..'"
    return ""


class Version(NamedTuple):
    """The version of a policy: `epoch` rises when a trainer takes the run over, `step` with each update.

    Ordered; never goes back, because a trainer that resumes from an older step has a higher epoch.
    """

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read `"epoch.step"`; raises ValueError on anything else."""
        epoch, _, step = text.partition(".")
        return cls(int(epoch), int(step))


@dataclass(frozen=True, slots=True, order=True)
class Uid:
    """Names one row for ever: the `attempt`-th try at sample `index` of a task.

    A redelivery after a fault keeps the uid (nothing was sampled that counts); a row that became too old and
    is sampled again gets the next attempt.
    """

    run: str
    task: str
    index: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.run}/{self.task}/{self.index}.{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> Uid:
        """Read `"run/task/index.attempt"`; raises ValueError on anything else."""
        head, _, tail = text.rpartition("/")
        run, _, task = head.partition("/")
        index, _, attempt = tail.partition(".")
        if not run or not task:
            raise ValueError(f"not a uid: {text!r} (want run/task/index.attempt)")
        return cls(run, task, int(index), int(attempt))


class Outcome(StrEnum):
    """How a rollout or a score ended. Only the first three may become training rows."""

    OK = "ok"
    TRUNCATED = "truncated"
    POLICY_FAULT = "policy_fault"
    INFRA_FAULT = "infra_fault"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"

    @property
    def trainable(self) -> bool:
        """True when the policy, not the infrastructure, is answerable for this outcome."""
        return self in (Outcome.OK, Outcome.TRUNCATED, Outcome.POLICY_FAULT)


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
    joint_cut: bool = False
    """top_k and top_p both cut the whole distribution, as SGLang does; else top_p cuts what top_k has left."""
    min_p: float = 0.0
    """Keep the tokens with this share of the likeliest one's probability, before top_p cuts; 0 is off."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens of prompt and response, and multiplies the others; 1 is off."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of tokens, before the penalty."""

    @property
    def fault(self) -> str:
        """Why no distribution is that; empty where one is."""
        if not self.temperature >= 0:
            return f"temperature is {self.temperature}, want 0 (greedy) or more"
        if not 0 < self.top_p <= 1:
            return f"top_p is {self.top_p}, want 0 < top_p <= 1"
        if not 0 <= self.min_p <= 1:
            return f"min_p is {self.min_p}, want 0 (off) to 1"
        if not 0 < self.repetition_penalty <= 2:
            return f"repetition_penalty is {self.repetition_penalty}, want more than 0, up to 2"
        for token, bias in self.logit_bias.items():
            if token < 0 or not -100 <= bias <= 100:
                return f"logit_bias of token {token} is {bias}, want -100 to 100, of a token's id"
        return ""

    @property
    def changes_logits(self) -> bool:
        """Whether tokens have other logits than the model's."""
        return self.repetition_penalty != 1 or bool(self.logit_bias)

    @property
    def cuts_twice(self) -> bool:
        """Whether `joint_cut` makes a difference."""
        return self.temperature > 0 and self.top_p < 1 and self.top_k > 1

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


MOST_MEDIA_BYTES = 16 << 20
"""The largest size of one picture's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """A picture. One of a prompt is sent and stored with the task, once for all rows of its group."""

    sha256: str
    """SHA-256 of `data` in 64 hexadecimal digits: the picture's name."""
    data: bytes = field(repr=False)
    """The file's bytes: PNG, JPEG and what else Pillow reads. Empty if only the name is given."""
    kind: str = "image"

    @classmethod
    def of(cls, data: bytes) -> Media:
        """The image `data`, by its name."""
        return cls(sha256=hashlib.sha256(data).hexdigest(), data=data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt to be answered `group_size` times."""

    run: str
    task_id: str
    prompt_ids: Int32
    """int32[P], chat template applied."""
    messages: tuple[Message, ...] = ()
    prompt_text: str = ""
    """The prompt where it is plain text and no conversation."""
    data_source: str = ""
    ground_truth: Json = None
    extra_info: Mapping[str, Json] = field(default_factory=dict)
    program: str = "single_turn"
    sampling: SamplingParams = field(default_factory=SamplingParams)
    group_size: int = 1
    deadline_s: float = 600.0
    """Seconds one rollout of this task may take before it counts as `timeout`."""
    priority: int = 0
    media: tuple[Media, ...] = ()
    """The prompt's pictures, in the order of their places in `prompt_ids`."""
    packed: bytes = field(default=b"", init=False, repr=False, compare=False)
    """The bytes in which it came, where it came in a call of `admit`: the queue stores them as they are."""

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The prompt as judges read it: plain text is what the user says; empty where only tokens are known."""
        if self.messages or not self.prompt_text:
            return self.messages
        return (Message(role="user", content=self.prompt_text),)

    def came_as(self, data: bytes) -> Task:
        """This task, which was read from `data`."""
        object.__setattr__(self, "packed", data)
        return self


@dataclass(frozen=True)
class PackedTask:
    """A task in the bytes in which it is stored and sent, decoded at the first access."""

    data: bytes
    unpack: Callable[[bytes], Task] = field(repr=False, compare=False)

    @cached_property
    def task(self) -> Task:
        """Raises CorruptError."""
        return self.unpack(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens `[start, end)` of a row were sampled by `version`."""

    version: Version
    start: int
    end: int


class RowFacts(NamedTuple):
    """Facts of a finished rollout by which the queue orders, counts and refuses it."""

    outcome: Outcome
    num_tokens: int
    """T: prompt and response tokens."""
    oldest: Version
    """The oldest version that sampled a token of the row: what staleness is measured from."""
    newest: Version
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    """Leading tokens that are the task's prompt, which the group's rows share; 0: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """One branch of a row: a sequence of its own, from `start` to the next part's."""

    start: int
    """The place of its first token in the row."""
    anchors: tuple[str, ...]
    """For each run of sampled tokens, a name of the observation that it answers; equal observations share a name."""
    seat: str = ""
    """The episode's speaker, whose reward is the row's component of that name; empty: no speaker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A row: one sampled answer with everything the mesh has added to it so far."""

    uid: Uid
    tokens: Int32
    """int32[T]: prompt, then response (and tool observations)."""
    loss_mask: Uint8
    """uint8[T]: 1 where the policy sampled the token."""
    rollout_logprobs: Float32
    """float32[T]: log-probability under the *actual* sampling distribution; 0 where `loss_mask` is 0."""
    spans: tuple[VersionSpan, ...]
    response_text: str = ""
    """The response decoded without special tokens: what a reward function reads."""
    reward: float | None = None
    reward_components: Mapping[str, float] = field(default_factory=dict)
    reward_texts: Mapping[str, str] = field(default_factory=dict)
    """The judge's texts by name."""
    reward_hash: str = ""
    token_rewards: Float32 | None = None
    """float32[T]: each token's reward, where the run has the column; 0 outside the response."""
    ref_logprobs: Float32 | None = None
    """float32[T]: log-probabilities under the frozen reference; 0 on the first token."""
    ref_top_ids: Int32 | None = None
    """int32[T, k]: the tokens that a teacher thinks likeliest at each place, where the run asks for them."""
    ref_top_logprobs: Float32 | None = None
    """float32[T, k]: their log-probabilities under the teacher."""
    rollout_times: tuple[float, float] | None = None
    """When its sampling began and ended, seconds since 1970; None if unknown."""
    reward_times: tuple[float, float] | None = None
    """Start and end of its scoring, as in `rollout_times`."""
    data_source: str = ""
    """The task's data source, once the row has a reward."""
    conversation: tuple[Mapping[str, Json], ...] = ()
    """Messages after the prompt, in rows of several turns: `role`, `content`, `name`, `tool_calls`."""
    parts: tuple[RowPart, ...] = ()
    """All branches of its conversation, in order; empty: the row is one sequence."""
    routed_experts: RoutedExperts | None = None
    """Experts of every token, if the run replays them in the trainer."""
    media: tuple[Media, ...] = ()
    """Its pictures in the order of their places, where the reader asked for them."""
    row_media: tuple[Media, ...] | None = None
    """As its column says it, some without data; `contract.rows.with_media` makes `media` of it. None: its task's."""
    replica: str = ""
    """Name of the rollout worker that sampled it; of several workers that continued each other's work, the last."""

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one."""
        sampled = np.flatnonzero(self.loss_mask)
        return int(sampled[0]) if len(sampled) else len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWrite:
    """Columns a lease holder adds to a row. `facts` is given by the rollout stage only."""

    uid: Uid
    columns: Columns
    facts: RowFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedRow:
    """One row handed to a stage: its task and the columns that the stage reads."""

    uid: Uid
    token: int
    """Fencing token: grows with every grant; a write under an older one is refused."""
    task: Task
    columns: Columns
    delivery: int
    """1 on the first delivery of the row to this stage, one more on each redelivery."""
    prefix: Columns = field(default_factory=dict)
    """Progress of earlier holders (`Queue.append`), concatenated by column; empty if there is none."""
