"""Whether a model computes in a pack what transformers computes of each row alone: tried on a small random copy.

    configuration ──▶ smallest sizes ──▶ random weights ─┬▶ rows in one pack, while it trains ─┐
                                                         └▶ transformers' own, row by row ─────┴▶ equal, or refused

Neither the name of a model nor a key of its configuration says what its code does: whether it takes positions as they
are given, keeps a state from one token to the next, or draws while it trains. A forward pass does, in a fraction of a
second, also for code that came with the checkpoint.

The small copy: what a model computes is said by strings, flags and factors, and they stay; numbers of layers, heads,
experts and tokens become small. The width of a head stays too, because how it is rotated and split refers to it in
ways of its own. Layers are chosen so that each kind is there, and windows are so short that rows of a few tokens
leave them.
"""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import torch

from meshrl.contract.errors import MeshError
from meshrl.contract.types import Int32
from meshrl.trainer.model.attention_kernels import without_kernels
from meshrl.trainer.model.packing import Pack, pack

HfModel: TypeAlias = Any
"""A transformers `PreTrainedModel`: the library has no types."""
Build: TypeAlias = Callable[[Any, bool], HfModel]
"""A model of a configuration: as meshrl trains it, or as transformers computes it."""
Packed: TypeAlias = Callable[[HfModel, Pack], torch.Tensor]
"""[N, …] of the response tokens of a pack."""
Alone: TypeAlias = Callable[[HfModel, torch.Tensor], torch.Tensor]
"""[T - 1, …] of a row int64[1, T], in the same places."""
TOLERANCE = 3e-4
"""Float32's rounding is a hundredth of it, in Gemma 3n half; the smallest fault that was seen is thrice as much."""
_MOST_MILLIONS = 250
_PREFIX, _LENGTHS = 12, (7, 21, 21)
LAYERS, HEADS, VOCABULARY, WINDOW = 6, 2, 128, 4
_WIDE = re.compile(r"intermediate_size|ffn_dim|ffn_hidden_size|dim_ff|n_inner|d_ff|lora_rank")
_WIDTH = 64
_HEADS = re.compile(r"(encoder|decoder)_attention_heads|linear_num_heads")
_EXPERTS = re.compile(r"(num|n|moe_num)_(local_|routed_)?experts")
_SHARED = "num_kv_shared_layers"
"""The last ones, which have the keys and values of earlier ones of their kind."""
_WINDOWS = re.compile(
    r"(?!max_).*window(_size|_len)?|(\w+_)?chunk_size|local_attention|index_(topk|topk_blocks|block_size)"
)


@torch.no_grad()
def fault(config: Any, build: Build, packed: Packed, alone: Alone) -> str:
    """Why a model of `config` cannot be trained in packs; empty where it can.

    The caller's random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]), without_kernels():
        torch.manual_seed(0)
        try:
            small = smallest(config)
            if (millions := _parameters(build, small) // 10**6) > _MOST_MILLIONS:
                return f"a small copy of it, to see what it computes in packs, has {millions} million parameters"
            theirs = build(small, False).eval()
            _draw(theirs)
            wanted = torch.cat([alone(theirs, _tensor(row)) for row in _rows()])
        except Exception as error:  # code of others: whatever it raises, it cannot be tried
            return (
                f"a small copy of it, to see what it computes in packs, ends in {first_line(error)}"
            )
        try:
            ours = build(small, True).train()
            ours.load_state_dict(theirs.state_dict())
            run = functools.partial(_run, ours, packed)
            before = torch.get_rng_state()
            found = run(_rows())
            if not torch.equal(torch.get_rng_state(), before):
                return (
                    "it draws random numbers while it trains: log-probs would not be the sampler's"
                )
            apart = float((found - wanted).abs().max())
            return "" if apart < TOLERANCE else _why(run, wanted, apart)
        except MeshError as error:
            return error.message
        except Exception as error:
            return f"it cannot compute packs: {first_line(error)}"


def _parameters(build: Build, config: Any) -> int:
    """Parameters of a model; 0 where it cannot be made without memory for them."""
    with suppress(Exception), torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config, False).parameters())
    return 0


def _why(run: Callable[..., torch.Tensor], wanted: torch.Tensor, apart: float) -> str:
    first, *others = _rows()
    if (run([first]) - wanted[: len(first) - 1]).abs().max() > TOLERANCE:
        return f"what it computes of a row is {apart:.0e} off of transformers' own, also by itself"
    one, other = (
        run([row, *others], share_prefixes=False)[len(first) - 1 :]
        for row in (first, first[::-1].copy())
    )
    if (one - other).abs().max() > TOLERANCE:
        return "rows of a pack would see each other: a state goes from one token to the next"
    return f"what it computes of a row in a pack is {apart:.0e} off: it may count positions over the whole pack"


def _run(
    ours: HfModel, packed: Packed, rows: Sequence[Int32], *, share_prefixes: bool = True
) -> torch.Tensor:
    return packed(ours, pack(rows, [1] * len(rows), share_prefixes=share_prefixes))


def _rows() -> list[Int32]:
    """One row, and two that share more than half, which attention takes apart, longer than a small copy's windows."""
    draw = np.random.default_rng(0)
    rows = [draw.integers(3, VOCABULARY - 8, n).astype(np.int32) for n in _LENGTHS]
    rows[2][:_PREFIX] = rows[1][:_PREFIX]
    return rows


def _tensor(row: Int32) -> torch.Tensor:
    return torch.from_numpy(row)[None].long()


def _draw(hf: HfModel) -> None:
    """Draw weights that let every part matter, biases and sinks included."""
    for parameter in hf.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def first_line(error: Exception) -> str:
    """The error in a line; with its kind, unless its words stand for themselves."""
    said = (str(error).strip().splitlines() or [""])[0]
    known = isinstance(error, OSError | ValueError)
    return said if said and known else f"{type(error).__name__}: {said}".removesuffix(": ")


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
    if wide := _number(config, "mamba_d_head"):
        new["mamba_n_heads"] = _number(config, "mamba_expand") * HEADS * width // wide
        if _number(config, "mamba_d_ssm"):
            new["mamba_d_ssm"] = new["mamba_n_heads"] * wide
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
