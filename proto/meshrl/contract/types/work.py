"""Requests and answers of the services beside the queue: engines and their weights, judges, the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from meshrl.contract.routed_experts import Experts
from meshrl.contract.types.rows import (
    Float32,
    Int32,
    Json,
    Media,
    Message,
    Outcome,
    SamplingParams,
    Uid,
    Version,
)


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
    """Positions in `prompt_ids` of the last pictures, which were observed between turns; the others take the first
    places for pictures there."""
    continued: int = 0
    """How many of the last `prompt_ids` belong to the response itself, sampled before: draws and stop strings
    continue from there. `sampling.max_tokens` counts what may still come, and may be 0 here: a response that has
    ended already is
    answered with its finish reason alone."""
    experts_from: int | None = None
    """The experts of the tokens from this place of the prompt on are wanted; None: none are."""
    prompt_top: int | None = None
    """Number of the likeliest tokens that are wanted at each place of the prompt, beside its own log-probs; None: not
    even those."""

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt that belong to no response."""
        return len(self.prompt_ids) - self.continued


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptLogprobs:
    """Log-probs of P tokens of a prompt under the model itself, at temperature 1: NaN for the first token."""

    logprobs: Float32
    """float32[P]"""
    top_ids: Int32
    """int32[P, k]: the likeliest tokens, the likeliest first; of no meaning at the first token."""
    top_logprobs: Float32
    """float32[P, k]"""


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
    prompt: PromptLogprobs | None = None
    """In one of the deltas, where they are wanted; none of a response that had ended before it was continued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """An engine's version, load and speed, for a scheduler."""

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
    """Memory in which the last version waited for its commit: device or host; empty: unknown."""


class OnUpdate(StrEnum):
    """Treatment of running generations when new weights arrive."""

    DRAIN = "drain"
    """Finish running requests under the old weights, start none, then update."""
    INTERRUPT = "interrupt"
    """Stop between two decode steps, update, recompute the KV cache under the new weights, continue."""
    IN_FLIGHT = "in_flight"
    """Stop between two decode steps, update, continue with the KV cache as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The place of one tensor in the layout of a version."""

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
    """xxh3-128 hex of each bucket; empty while the version is being gathered."""
    tensor_hashes: tuple[int, ...] = ()
    """xxh3-64 of each tensor, to say which one is wrong; may be empty."""
    adapter: Adapter | None = None
    """The LoRA adapter in the buckets, to be merged before an engine sees it; None: they hold whole weights."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all buckets: what travels."""
        return sum(self.bucket_bytes)

    @property
    def served(self) -> WeightManifest:
        """The version as engines serve it."""
        return self.adapter.merged if self.adapter else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """How the tensors of a manifest, `<module>.lora_A.weight` and `<module>.lora_B.weight`, become weights.

    W + scale B A for each target, in float32; every other tensor is the base's. Then all are cast.
    """

    base: str
    """xxh3-128 hex over the checkpoint that the adapter belongs to."""
    rank: int
    scale: float
    """alpha / rank, or alpha / √rank."""
    targets: tuple[str, ...]
    """Modules of the model that have an A and a B."""
    merged: WeightManifest
    """The manifest of the merged weights, hashes included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A row as its judge sees it."""

    uid: Uid
    data_source: str
    solution: str
    ground_truth: Json
    extra_info: Mapping[str, Json]
    messages: tuple[Message, ...] = ()
    """The prompt, for judges that read the conversation; empty where the caller has only tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostedReward:
    """The reward that the maker of a row sends with it; it replaces the judge's score."""

    score: float
    components: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> Json:
        """The reward as JSON, for a column and for a judge's `extra_info`."""
        return {"score": self.score, "components": dict(self.components)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A judge's answer for a sample. `score` counts only when `outcome.trainable`."""

    uid: Uid
    outcome: Outcome
    score: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    reward_hash: str = ""
    token_rewards: tuple[float, ...] | None = None
    """One per response token, in order, where the judge gives them: the reward then; `score` is what reports show."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """The judge's texts by name, kept with the row for people; not metrics."""
    lasting: bool = False
    """True for a fault that another try would meet again, as far as the judge can tell."""


class TrainerPhase(StrEnum):
    """The current activity of a trainer."""

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
    """The reason of the current wait, in words; empty if there is none."""
