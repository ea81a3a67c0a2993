"""The nouns of the mesh: frozen values that travel between rooms.

Arrays are numpy, C-contiguous, little-endian. Shapes are written with T = tokens of one row (prompt and
response together), R = response tokens, G = rows of one group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Json: TypeAlias = Any
"""A value that `json.dumps` takes: the one `Any` of the contract."""
Int32: TypeAlias = npt.NDArray[np.int32]
Uint8: TypeAlias = npt.NDArray[np.uint8]
Float32: TypeAlias = npt.NDArray[np.float32]
Columns: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""Column name to array: the payload of one row, as the queue stores it."""


@dataclass(frozen=True, slots=True, order=True)
class Version:
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
    """So many of the last rows of a group are sampled greedily instead: baselines (ReMax)."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens `[start, end)` of a row were sampled by `version`."""

    version: Version
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """What the queue must know of a finished rollout to order, count and refuse it."""

    outcome: Outcome
    num_tokens: int
    """T: prompt and response tokens."""
    oldest: Version
    """The oldest version that sampled a token of the row: what staleness is measured from."""
    newest: Version
    finish_reason: str = "stop"


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
    reward_hash: str = ""
    ref_logprobs: Float32 | None = None
    """float32[T]: log-probabilities under the frozen reference; 0 on the first token."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Rows granted to one worker for one stage until `ttl_s` after the grant or the last renewal."""

    stage: str
    worker: str
    ttl_s: float
    rows: tuple[LeasedRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """A stage leases rows that have every column in `reads` and none in `writes`."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


ROLLOUT_COLUMNS = ("tokens", "loss_mask", "rollout_logprobs", "spans", "response_text")
REWARD_COLUMNS = ("reward", "reward_components", "reward_hash")
REFERENCE_COLUMNS = ("ref_logprobs",)
ROLLOUT_STAGE = StageSpec(name="rollout", reads=(), writes=ROLLOUT_COLUMNS)
REWARD_STAGE = StageSpec(name="reward", reads=("response_text", "loss_mask"), writes=REWARD_COLUMNS)
REFERENCE_STAGE = StageSpec(name="reference", reads=("tokens",), writes=REFERENCE_COLUMNS)


class GroupPolicy(StrEnum):
    """When a group of a task counts as complete."""

    ALL = "all"
    K_OF_N = "k_of_n"
    REPLACE_SIBLING = "replace_sibling"


class StalePolicy(StrEnum):
    """What happens to a task whose rows became older than `max_staleness`."""

    REISSUE = "reissue"
    DROP = "drop"


UNBOUNDED = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """What a run asks of the queue. Opening the same run twice with equal specs is opening it once."""

    run: str
    group_size: int
    batch_groups: int
    """Groups of one optimizer step's batch."""
    max_staleness: float
    """Optimizer steps between sampling and training; `math.inf` is fully asynchronous."""
    stages: tuple[StageSpec, ...] = (ROLLOUT_STAGE, REWARD_STAGE)
    """In order. The union of what they write is what a row must have before it can be taken."""
    group_policy: GroupPolicy = GroupPolicy.ALL
    group_k: int = 0
    """For `k_of_n`: how many finished rows make the group complete."""
    stale_policy: StalePolicy = StalePolicy.REISSUE
    max_attempts: int = 3
    """Deliveries of a row to a stage before it is dead-lettered."""
    lease_ttl_s: float = 30.0
    resident_batches: int = 4
    """Admission bound, in batches, where `max_staleness` is infinite."""
    resident_bytes: int = 4 << 30
    sampler: str = "fifo"
    gated: bool = True
    """True: admission and leases follow the published version. False (evaluation): they do not."""
    priority: int = 0
    """A worker that serves several runs is given rows of the highest priority first."""

    @property
    def admission_groups(self) -> float:
        """Groups that may be admitted and not yet consumed: `(max_staleness + 1) x batch`."""
        batches = (
            self.resident_batches if math.isinf(self.max_staleness) else self.max_staleness + 1
        )
        return batches * self.batch_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands in the queue."""

    spec: RunSpec
    epoch: int
    """0 until a trainer has acquired the run."""
    published: Version
    """The newest version that the fleet has committed."""
    cursor: str
    """The feeder's position, stored with the last admitted task; empty at the start."""
    feed_closed: bool
    committed_step: int
    """Rows settled at earlier steps have left the queue for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """One row of a batch's manifest."""

    uid: Uid
    group: str
    """Task id: rows of one group share it and stand next to each other."""
    group_size: int
    """The true size of the group: what the estimator divides by, also when fewer rows were kept."""
    num_tokens: int
    oldest: Version
    newest: Version
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Complete groups taken for optimizer step `step`. Payload is fetched apart, by each rank its own rows."""

    batch_id: str
    run: str
    step: int
    rows: tuple[BatchRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where every admitted row of a run is. `admitted = trained + filtered + stale + dead_lettered + resident`."""

    run: str
    admitted: int
    trained: int
    filtered: Mapping[str, int]
    """Rows by reason."""
    stale: Mapping[str, int]
    dead_lettered: Mapping[str, int]
    resident: Mapping[str, int]
    """Rows by state: queued, leased, pending (between stages), ready, taken, settled."""

    @property
    def left(self) -> int:
        """Rows that are resident no more."""
        parts = (self.filtered, self.stale, self.dead_lettered)
        return self.trained + sum(sum(part.values()) for part in parts)

    @property
    def balanced(self) -> bool:
        """The invariant that no kill may break."""
        return self.admitted == self.left + sum(self.resident.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """One thing that blocks: who waits, for what, since when, and whom to ask."""

    who: str
    what: str
    since_s: float
    owners: tuple[str, ...] = ()
    uids: tuple[Uid, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A row that was given up, with what was tried."""

    uid: Uid
    stage: str
    outcome: Outcome
    reason: str
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One response to be sampled by an engine."""

    request_id: str
    prompt_ids: Int32
    """int32[P]"""
    sampling: SamplingParams


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


class OnUpdate(StrEnum):
    """What a running generation does when new weights arrive."""

    DRAIN = "drain"
    """Finish running requests under the old weights, start none, then update."""
    INTERRUPT = "interrupt"
    """Stop between two decode steps, update, recompute the KV cache under the new weights, go on."""
    IN_FLIGHT = "in_flight"
    """Stop between two decode steps, update, go on with the KV cache as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a judge sees of a row."""

    uid: Uid
    data_source: str
    solution: str
    ground_truth: Json
    extra_info: Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a judge says of a sample. `score` counts only when `outcome.trainable`."""

    uid: Uid
    outcome: Outcome
    score: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    reward_hash: str = ""


class TrainerPhase(StrEnum):
    """What a trainer does now."""

    STARTING = "starting"
    WAITING = "waiting"
    """For rows, or for the weight plane: `TrainerStatus.waiting_for` says which."""
    TRAINING = "training"
    PUBLISHING = "publishing"
    EVALUATING = "evaluating"
    CHECKPOINTING = "checkpointing"
    DONE = "done"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """True when nothing will change any more."""
        return self in (TrainerPhase.DONE, TrainerPhase.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    """How training does."""

    step: int
    """Optimizer steps done."""
    total_steps: int
    """Optimizer steps planned; 0 while unknown."""
    version: Version
    """The version that these steps have made."""
    phase: TrainerPhase
    reward_mean: float | None = None
    """Mean reward of the last batch; None before the first."""
    held_out_score: float | None = None
    """The last held-out score; None before the first evaluation."""
    tokens_per_s: float = 0.0
    """Trained tokens a second, over the last steps."""
    samples: int = 0
    """Rows trained since the start of the run."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Rows trained by staleness in optimizer steps."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last step's metrics by name."""
    eta_s: float | None = None
    """Seconds to the last planned step; None while unknown."""
    waiting_for: str = ""
    """What it waits for, in words; empty when it waits for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Where one tensor lies in the wire layout of a version."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """numpy-style: float32, bfloat16, float16."""
    shape: tuple[int, ...]
    bucket: int
    offset: int
    """Bytes from the bucket's start; a multiple of the item size."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """A version of the weights: sent, never derived by the receiver."""

    run: str
    version: Version
    tensors: tuple[TensorSpec, ...]
    bucket_bytes: tuple[int, ...]
    bucket_hashes: tuple[str, ...]
    """xxh3-128 hex of each bucket."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(self.bucket_bytes)


def oldest_version(spans: Sequence[VersionSpan], default: Version) -> Version:
    """The oldest version of `spans`, or `default` when nothing was sampled."""
    return min((span.version for span in spans), default=default)
