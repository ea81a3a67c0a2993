"""How much memory a service takes of each of its GPUs: an estimate from a checkpoint's config.json and the recipe.

trainer   weights, gradients and AdamW's two moments in float32: 16 bytes a parameter, over the ranks; the activations
          of one micro-batch (every layer's, or with checkpointing one layer's and each layer's input); a chunk of
          logits and the head's gradient; the layers that FSDP gathers
reference weights and one layer's activations in the compute type
engine    weights in 16 bits over its GPUs, and a cache for at least CACHED_ROWS rows of the greatest length
each      OVERHEAD for the CUDA context, the kernels and NCCL
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshrl.common.device_lease import LOGIT_BYTES, ROWS_PER_LAID, logits_at_once
from meshrl.config.machine import GIB
from meshrl.config.recipe import Recipe, algorithm_needs

OVERHEAD = 3 * GIB // 2
CACHED_ROWS = 8
"""An engine with room for fewer rows at once would be no faster than one request after the other."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense or sparse decoder, as config.json says it."""

    hidden: int
    layers: int
    vocabulary: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_dim: int
    tied: bool
    experts: int = 0
    expert_intermediate: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape | None:
        """None where config.json names its sizes in other words. The vision tower is left out."""
        config = {**config, **(config.get("text_config") or {})}
        try:
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            experts = config.get("num_experts") or config.get("num_local_experts") or 0
            return cls(
                hidden=hidden,
                layers=int(config["num_hidden_layers"]),
                vocabulary=int(config["vocab_size"]),
                intermediate=int(config["intermediate_size"]),
                heads=heads,
                key_value_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                tied=bool(config.get("tie_word_embeddings", False)),
                experts=int(experts),
                expert_intermediate=int(
                    config.get("moe_intermediate_size") or config["intermediate_size"]
                ),
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return None

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer; norms and biases are left out."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.key_value_heads)
        if self.experts:
            return attention + 3 * self.hidden * self.expert_intermediate * self.experts
        return attention + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * self.layer_parameters

    def layer_activations(self, tokens: int, element: int) -> int:
        """Bytes that a layer keeps for its backward pass: inputs of norms and matrices, and of the gated product."""
        width = 6 * self.hidden + 2 * self.head_dim * (self.heads + self.key_value_heads)
        return tokens * element * (width + 4 * self.intermediate)

    def attention_copies(self, tokens: int, element: int) -> int:
        """Bytes of what attention keeps of tokens that are laid once and read by several rows."""
        whole = self.heads + self.key_value_heads  # rows of which less than half is shared
        width = max(whole, (ROWS_PER_LAID - 1) * self.key_value_heads)
        return tokens * element * 2 * self.head_dim * width

    def cache(self, tokens: int) -> int:
        """Keys and values in 16 bits."""
        return 2 * 2 * self.layers * self.key_value_heads * self.head_dim * tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes on each GPU of a service."""

    weights: int
    """Master weights and what is gathered of them, or those that an engine serves."""
    state: int = 0
    """Gradients and moments."""
    work: int = 0
    """Activations and logits, or the smallest useful cache."""

    @property
    def total(self) -> int:
        """Total, including the overhead per process."""
        return self.weights + self.state + self.work + OVERHEAD


def trainer_need(recipe: Recipe, model: ModelShape, gpus: int, memory: int) -> Need:
    """On each of the trainer's GPUs, of which each has `memory` bytes; 0: unknown."""
    config, actor = recipe.model, recipe.actor
    element = BYTES[config.param_dtype]
    trained = model.parameters * (2 if algorithm_needs(recipe).critic else 1)
    parallel = recipe.parallel
    full = 4 * trained * parallel.data_replicate // gpus
    states = 0 if config.lora_rank else 3 * full
    gathered = 2 * element * model.layer_parameters + element * model.vocabulary * model.hidden
    tokens = math.ceil(actor.ppo_max_token_len_per_gpu / parallel.sequence)
    layer = model.layer_activations(tokens, element) + model.attention_copies(tokens, element)
    if config.enable_gradient_checkpointing and not config.keep_matmuls:
        activations = layer + model.layers * tokens * element * model.hidden
    else:
        activations = layer * model.layers
    head = LOGIT_BYTES * logits_at_once(memory) + (
        0 if config.lora_rank else 4 * model.vocabulary * model.hidden
    )
    on_device = 0 if config.param_offload else 1
    return Need(
        weights=full * on_device + gathered, state=states * on_device, work=activations + head
    )


def reference_need(recipe: Recipe, model: ModelShape, memory: int) -> Need:
    """On each of the reference's GPUs, of which each has `memory` bytes; 0: unknown."""
    element = BYTES[recipe.model.param_dtype]
    tokens, ranks = recipe.reference.max_tokens_per_batch, recipe.reference.nproc
    whole = 2 * model.layer_parameters + model.vocabulary * model.hidden if ranks > 1 else 0
    return Need(
        weights=element * (model.parameters // ranks + whole),
        work=model.layer_activations(tokens, element)
        + model.attention_copies(tokens, element)
        + LOGIT_BYTES * logits_at_once(memory),
    )


def engine_need(recipe: Recipe, model: ModelShape, gpus: int) -> Need:
    """On each GPU of a rollout worker."""
    longest = recipe.data.max_prompt_length + recipe.data.max_response_length
    rows = min(CACHED_ROWS, recipe.rollout.slots)
    return Need(weights=2 * model.parameters // gpus, work=model.cache(longest * rows) // gpus)
