"""Requests of a client with its own training loop: a model, a pass, an optimizer step, a copy of the weights.

A model's requests are numbered from 0, and the number is what makes a repeated request the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshrl.contract.types.rows import Float32, Int32, Media

LossName: TypeAlias = Literal[
    "cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingExample:
    """Tokens that a model reads, and what a loss wants to know at each of them."""

    tokens: Int32
    """int32[T]: the model's input."""
    loss_inputs: Mapping[str, NDArray[np.int64] | Float32]
    """Inputs by name, int64[T] or float32[T]: `target_tokens`, `weights`, `logprobs`, `advantages`, ...

    Each loss says which it wants (`trainer/hosted/losses.py`). `cross_entropy` takes `target_tokens` and `weights` of
    [T, K], too. `stable_reinforce` wants `mask`, 1 at sampled tokens: what Tinker's provenance spans say.
    """
    media: tuple[Media, ...] = ()
    """Its pictures, in the order of their places in `tokens`; places behind those are tokens that were sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateModel:
    """A model of its own on the mesh's base model: adapters of a rank, or all weights."""

    base_model: str
    lora_rank: int | None = None
    """None: all weights are trained."""
    lora_seed: int | None = None
    lora_attention: bool = True
    lora_mlp: bool = True
    lora_unembedding: bool = True
    load_from: str | None = None
    """Checkpoint to begin with, in place of fresh adapters: its own rank and modules count, not those above."""
    with_optimizer: bool = False
    """The optimizer's state of that checkpoint, too."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """A forward pass over examples, and the gradients of their loss, which are added to those that wait."""

    examples: Sequence[TrainingExample]
    loss: LossName
    loss_settings: Mapping[str, float] = field(default_factory=dict)
    backward: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamStep:
    """An AdamW step with the gradients that wait, which are gone after it."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """0: gradients are not clipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeights:
    """A copy of a model under a name: to continue from, or to sample from."""

    name: str
    for_sampler: bool = False
    overwrite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights:
    """The weights of a checkpoint in place of a model's."""

    path: str
    with_optimizer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadModel:
    """The end of a model; its checkpoints stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A request that was wrong before it came here: its number is used up, and later ones need not wait for it."""

    error: str


TrainingVerb: TypeAlias = (
    CreateModel | Pass | AdamStep | SaveWeights | LoadWeights | UnloadModel | Refused
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """One numbered request of a model."""

    model: str
    number: int
    verb: TrainingVerb


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingResult:
    """The answer to a request."""

    outputs: Sequence[Mapping[str, Float32]] = ()
    """Per example, in the shape of its `target_tokens` by name: `logprobs` of these."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    path: str | None = None
    """The path of weights that were saved: `tinker://MODEL/weights/NAME` or `tinker://MODEL/sampler_weights/NAME`."""
    error: str | None = None
    """Why the request failed; then nothing of it was done."""
    user_error: bool = True
    """The request was wrong; False: the server was."""
