"""Sizes and options of a decoder, read from a checkpoint's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshrl.contract.errors import UserError
from meshrl.rollout.config import HYBRID_ARCHITECTURES, STATIC_ROPES, TORCH_ARCHITECTURES
from meshrl.rollout.end_tokens import eos_token_ids
from meshrl.rollout.engines.torch.linear_attention import DeltaRuleShape

STACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""Names in a layer of all experts' matrices, [experts, 2 I, hidden] and [experts, hidden, I], where a checkpoint has
them in two tensors (Qwen3.5-MoE)."""
UNREAD = ("model.visual.", "mtp.")
"""How names begin of what is not computed: a vision tower, and layers that predict further tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMixture:
    """The layers whose MLP is a mixture of experts: each token goes to the `chosen` with the greatest score."""

    layers: frozenset[int]
    experts: int
    chosen: int
    intermediate_size: int
    normalised: bool
    """A token's shares are made to sum to 1."""
    module: str
    """Name of the MLP in a layer; its router is `gate`."""
    projections: tuple[str, str, str]
    """Names of an expert's gate, up and down projection."""
    shared_size: int = 0
    """Width of an expert that every token goes to; 0: there is none."""

    def router(self) -> str:
        """Name of the router's matrix [experts, hidden] in a layer."""
        return f"{self.module}.gate.weight"

    def expert(self, index: int) -> tuple[str, str, str]:
        """Names of an expert's gate, up and down matrix in a layer."""
        gate, up, down = (
            f"{self.module}.experts.{index}.{name}.weight" for name in self.projections
        )
        return gate, up, down


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderArchitecture:
    """A decoder-only transformer of the Llama family."""

    name: str
    decoder: str
    """The beginning of its parameters' names."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tied: bool
    """The output projection is the embedding matrix."""
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    gated: bool
    """The output of attention is multiplied by the sigmoid of a gate; each head's query is stored in front of it."""
    centred: bool
    """Weights of norms are stored without the 1 that they are added to."""
    delta_rule: DeltaRuleShape | None
    """None where every layer has attention."""
    mixture: ExpertMixture | None
    """None where every layer's MLP is dense."""
    max_length: int
    """Longest sequence that the checkpoint allows (its sliding window, where it has one)."""
    inverse_frequencies: torch.Tensor
    """float32[head_dim / 2], 0 where nothing is rotated."""
    rotated: int
    """How many numbers of a head are rotated, from the first on."""
    rope_factor: float
    """Scales cosine and sine (yarn)."""
    eos_token_ids: tuple[int, ...]

    @property
    def embedding(self) -> str:
        """Name of the embedding matrix."""
        return f"{self.decoder}embed_tokens.weight"

    def rotation(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine of positions `0 … length - 1`, each float32[length, head_dim].

        The sine's first half is negated, so that `x * cos + swap_halves(x) * sin` rotates.
        """
        frequencies = self.inverse_frequencies.to(device)
        angles = torch.outer(torch.arange(length, device=device).float(), frequencies)
        cos, sin = angles.cos() * self.rope_factor, angles.sin() * self.rope_factor
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def shapes(self, *, stacked: bool = False) -> Mapping[str, tuple[int, ...]]:
        """Hugging Face parameter name to shape, for every parameter of the decoder.

        With `stacked` a layer's experts are two tensors.
        """
        hidden = self.hidden_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norms: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        queried = queries * (1 + self.gated)
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (queried, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
        }
        if self.qkv_bias:
            layer |= {
                f"self_attn.{p}_proj.bias": (n,)
                for p, n in zip("qkv", (queried, keys, keys), strict=True)
            }
        if self.out_bias:
            layer["self_attn.o_proj.bias"] = (hidden,)
        if self.qk_norm:
            layer |= {f"self_attn.{p}_norm.weight": (self.head_dim,) for p in "qk"}
        shapes: dict[str, tuple[int, ...]] = {
            self.embedding: (self.vocab_size, hidden),
            f"{self.decoder}norm.weight": (hidden,),
        }
        for index in range(self.num_layers):
            rule = self.delta_rule_of(index)
            mixes = layer if rule is None else rule.shapes(hidden)
            named = norms | mixes | self._mlp_shapes(index, stacked)
            shapes |= {
                f"{self.decoder}layers.{index}.{name}": shape for name, shape in named.items()
            }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def delta_rule_of(self, layer: int) -> DeltaRuleShape | None:
        """The delta rule of a layer; None for a layer with attention."""
        rule = self.delta_rule
        return rule if rule is not None and layer in rule.layers else None

    def mixture_of(self, layer: int) -> ExpertMixture | None:
        """The experts of a layer; None for a dense MLP."""
        mixture = self.mixture
        return mixture if mixture is not None and layer in mixture.layers else None

    def _mlp_shapes(self, layer: int, stacked: bool) -> dict[str, tuple[int, ...]]:
        hidden, mixture = self.hidden_size, self.mixture_of(layer)
        if mixture is not None:
            inner = mixture.intermediate_size
            wanted = ((inner, hidden), (inner, hidden), (hidden, inner))
            shapes: dict[str, tuple[int, ...]] = {mixture.router(): (mixture.experts, hidden)}
            if stacked:
                shapes |= {
                    STACKED[0]: (mixture.experts, 2 * inner, hidden),
                    STACKED[1]: (mixture.experts, hidden, inner),
                }
            for index in range(0 if stacked else mixture.experts):
                shapes |= dict(zip(mixture.expert(index), wanted, strict=True))
            if inner := mixture.shared_size:
                wanted = ((inner, hidden), (inner, hidden), (hidden, inner))
                named = (f"mlp.shared_expert.{name}.weight" for name in mixture.projections)
                shapes |= dict(zip(named, wanted, strict=True))
                shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
            return shapes
        ffn = self.intermediate_size
        sizes = (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn))
        shapes = {f"mlp.{name}_proj.weight": (out, size) for name, out, size in sizes}
        if self.mlp_bias:
            shapes |= {f"mlp.{name}_proj.bias": (out,) for name, out, _ in sizes}
        return shapes


def read_architecture(checkpoint: Path) -> DecoderArchitecture:
    """Read `config.json` of a checkpoint directory, and what ends a response.

    Raises:
        UserError: no such file, or a model that this decoder cannot run; says which it can.
    """
    raw = _json(checkpoint / "config.json")
    if raw is None:
        raise UserError(
            f"{checkpoint} is not a Hugging Face checkpoint directory: it has no config.json"
        )
    names = raw.get("architectures") or ["an unnamed architecture"]
    if names[0] not in TORCH_ARCHITECTURES:
        raise UserError(
            f"{checkpoint}: the torch engine cannot run {names[0]} (it runs {', '.join(TORCH_ARCHITECTURES)}; "
            "other models need rollout.name=vllm or sglang)"
        )
    from transformers import AutoConfig  # costs a second: only where a model is loaded

    whole = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
    config = whole.get_text_config()
    if config.hidden_act != "silu":
        raise UserError(
            f"{checkpoint}: activation {config.hidden_act!r} is not supported (silu is)"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies, factor, rotated = _frequencies(config, head_dim, checkpoint)
    rule = _delta_rule(names[0], config)
    bias = bool(getattr(config, "attention_bias", False))
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    windowed = bool(window) and (types is None or "sliding_attention" in types)
    longest = config.max_position_embeddings
    return DecoderArchitecture(
        name=names[0],
        decoder="model." if config is whole else "model.language_model.",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps,
        tied=bool(whole.tie_word_embeddings),
        qkv_bias=bias or names[0] == "Qwen2ForCausalLM",
        out_bias=bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=names[0].startswith("Qwen3"),
        gated=rule is not None,
        centred=rule is not None,
        delta_rule=rule,
        mixture=_mixture(names[0], config),
        max_length=min(longest, window) if windowed else longest,
        inverse_frequencies=frequencies,
        rotated=rotated,
        rope_factor=factor,
        eos_token_ids=eos_token_ids(checkpoint),
    )


def _mixture(name: str, config: Any) -> ExpertMixture | None:
    """The mixture of experts that `config` describes; None for a dense model."""
    if name == "MixtralForCausalLM":
        return ExpertMixture(
            layers=frozenset(range(config.num_hidden_layers)),
            experts=config.num_local_experts,
            chosen=config.num_experts_per_tok,
            intermediate_size=config.intermediate_size,
            normalised=True,
            module="block_sparse_moe",
            projections=("w1", "w3", "w2"),
        )
    if not name.startswith(("Qwen3Moe", "Qwen3Next", "Qwen3_5Moe")):
        return None
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    step = getattr(config, "decoder_sparse_step", 1)
    return ExpertMixture(
        layers=frozenset(
            layer
            for layer in range(config.num_hidden_layers)
            if layer not in dense and (layer + 1) % step == 0
        ),
        experts=config.num_experts,
        chosen=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        normalised=getattr(config, "norm_topk_prob", True),
        module="mlp",
        projections=("gate_proj", "up_proj", "down_proj"),
        shared_size=getattr(config, "shared_expert_intermediate_size", 0),
    )


def _delta_rule(name: str, config: Any) -> DeltaRuleShape | None:
    """The linear-attention layers that `config` describes; None for an architecture without them."""
    if name not in HYBRID_ARCHITECTURES:
        return None
    return DeltaRuleShape(
        layers=frozenset(
            layer for layer, kind in enumerate(config.layer_types) if kind == "linear_attention"
        ),
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        width=config.linear_conv_kernel_dim,
        interleaved=name == "Qwen3NextForCausalLM",
    )


def _frequencies(config: Any, head_dim: int, checkpoint: Path) -> tuple[torch.Tensor, float, int]:
    """Rotary frequencies float32[head_dim / 2], the factor on cosine and sine, how much of a head is rotated."""
    # transformers 5 keeps theta and scaling in `rope_parameters`, 4 in `rope_theta` and `rope_scaling`.
    rope = getattr(config, "rope_parameters", None) or {
        "rope_theta": getattr(config, "rope_theta", 10_000.0),
        **(getattr(config, "rope_scaling", None) or {}),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in STATIC_ROPES:
        raise UserError(
            f"{checkpoint}: rope type {kind!r} is not supported (known: {', '.join(STATIC_ROPES)})"
        )
    if kind == "default":
        rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotated, 2, dtype=torch.float) / rotated
        found = torch.zeros(head_dim // 2)
        found[: rotated // 2] = 1.0 / (rope["rope_theta"] ** exponents)
        return found, 1.0, rotated
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if 2 * len(frequencies) != head_dim:
        raise UserError(f"{checkpoint}: partial rotary embeddings are not supported")
    return frequencies, float(factor), head_dim


def _json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    return content
