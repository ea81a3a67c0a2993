"""A model's configuration with the smallest sizes at which it still is the same kind of model.

What a model computes is said by strings, flags and factors, and they stay; numbers of layers, heads, experts and
tokens become small. The width of a head stays too, because how it is rotated and split refers to it in ways of its
own. Layers are chosen so that each kind is there, and windows are so short that rows of a few tokens leave them.
"""

from __future__ import annotations

import copy
import math
import re
from typing import Any

LAYERS, HEADS, VOCABULARY, WINDOW = 6, 2, 128, 4
_WIDE = re.compile(r"intermediate_size|ffn_dim|ffn_hidden_size|dim_ff|n_inner|d_ff|lora_rank")
_WIDTH = 64
_HEADS = re.compile(r"(encoder|decoder)_attention_heads")
_EXPERTS = re.compile(r"(num|n|moe_num)_(local_|routed_)?experts")
_SHARED = "num_kv_shared_layers"
"""The last ones, which have the keys and values of earlier ones of their kind."""
_WINDOWS = re.compile(
    r"(?!max_).*window(_size|_len)?|(\w+_)?chunk_size|local_attention|index_(topk|topk_blocks|block_size)"
)


def smallest(config: Any) -> Any:
    """A copy of a transformers configuration, and of those within it, with small sizes."""
    found = copy.deepcopy(config)
    _shrink(found)
    return found


def _shrink(config: Any) -> None:
    for part in vars(config).values():
        if hasattr(part, "model_type"):
            _shrink(part)
    layers, new = _number(config, "num_hidden_layers"), _heads(config)
    chosen = _chosen(config, layers)
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and layers and len(value) == layers:
            new[name] = type(value)(_smaller(config, name, value[layer]) for layer in chosen)
        elif (smaller := _smaller(config, name, value)) != value:
            new[name] = smaller
    new["num_hidden_layers"] = len(chosen)
    if shared := _number(config, _SHARED):
        new[_SHARED] = sum(layer >= layers - shared for layer in chosen)
    for name, value in new.items():
        if value:
            setattr(config, name, value)


def _number(config: Any, name: str) -> int:
    """0 where it has none."""
    try:
        value = getattr(config, name, 0)
    except (
        Exception
    ):  # an alias of what this kind does not have, or what its layers have each for itself
        return 0
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _heads(config: Any) -> dict[str, Any]:
    """Fewer heads, of the width that they have; and the hidden size that goes with it."""
    heads, hidden = _number(config, "num_attention_heads"), _number(config, "hidden_size")
    if not heads or not hidden:
        return {}
    width = _number(config, "head_dim") or hidden // heads
    new: dict[str, Any] = {"num_attention_heads": HEADS, "hidden_size": HEADS * width}
    for name in ("num_key_value_heads", "num_kv_heads"):
        if keys := _number(config, name):
            new[name] = HEADS if keys == heads else 1
    return new


def _smaller(config: Any, name: str, value: Any) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name.startswith("linear_num_") and name.endswith("_heads"):
        others = (_number(config, f"linear_num_{kind}_heads") for kind in ("key", "value"))
        return value // (math.gcd(*others) or 1)
    if name.startswith("vocab_size"):
        return VOCABULARY
    if name.endswith("token_id"):
        return min(value, VOCABULARY - 1)
    if _WIDE.search(name):
        return min(value, _WIDTH)
    if _HEADS.fullmatch(name):
        return min(value, HEADS)
    if _WINDOWS.fullmatch(name):
        return min(value, WINDOW)
    if _EXPERTS.fullmatch(name):
        chosen = _number(config, "num_experts_per_tok") or _number(config, "moe_topk")
        return min(value, max(4, 2 * chosen, 2 * _number(config, "n_group")))
    return value


def _chosen(config: Any, layers: int) -> list[int]:
    """The first layer of each kind, as lists with an entry for each layer tell them apart, and the first others."""
    lists = [
        value
        for value in vars(config).values()
        if isinstance(value, list | tuple)
        and len(value) == layers
        and all(isinstance(entry, str | int) for entry in value)
    ]
    shared = _number(config, _SHARED)
    kinds = list(zip(*lists, (layer >= layers - shared for layer in range(layers)), strict=True))
    first = sorted({kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}.values())
    others = [layer for layer in range(layers) if layer not in first]
    return sorted([*first, *others][:LAYERS])
