"""The parameters as the decoder multiplies them: q, k, v in one matrix, gate and up in one matrix."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from meshrl.contract.errors import UserError
from meshrl.contract.types import TensorSpec, Uint8, WeightManifest
from meshrl.rollout.engines.torch.architecture import (
    STACKED,
    UNREAD,
    DecoderArchitecture,
    ExpertMixture,
)
from meshrl.rollout.engines.torch.linear_attention import DeltaRule, DeltaRuleShape
from meshrl.rollout.engines.torch.operations import DenseMlp, RmsNorm, SparseMlp

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
HEAD = "lm_head.weight"
NAMES_SHOWN = 4
"""Names listed in an error before it says how many more there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights that every kind of layer has. H query heads, K key heads, D head_dim, C hidden, F ffn."""

    input_norm: RmsNorm
    """[C]"""
    out: torch.Tensor
    """[H D, C]: transposed, for addmm."""
    out_bias: torch.Tensor | None
    post_norm: RmsNorm
    """[C]"""
    mlp: DenseMlp | SparseMlp

    def to(self, device: torch.device) -> Self:
        """The same on `device`."""
        parts: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved = {name: part.to(device) for name, part in parts.items() if part is not None}
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer(LayerWeights):
    """A layer with attention."""

    qkv: torch.Tensor
    """[(H + 2K) D, C]: queries, keys, values; then, of a gated one, [H D, C] of the gate."""
    qkv_bias: torch.Tensor | None
    qk_norm: RmsNorm | None
    """[H + K, D]: the query norm for H rows, then the key norm for K."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRuleLayer(LayerWeights):
    """A layer that keeps a state of each row instead of keys and values."""

    rule: DeltaRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A complete version of the model, immutable once built."""

    embedding: torch.Tensor
    """[V, C]"""
    layers: tuple[AttentionLayer | DeltaRuleLayer, ...]
    final_norm: RmsNorm
    """[C]"""
    head: torch.Tensor
    """[V, C]; the embedding itself where the model ties them."""

    def to(self, device: torch.device) -> Weights:
        """The same on `device`; a tied head stays tied."""
        if self.embedding.device.type == device.type:
            return self
        embedding = self.embedding.to(device)
        return Weights(
            embedding=embedding,
            layers=tuple(layer.to(device) for layer in self.layers),
            final_norm=self.final_norm.to(device),
            head=embedding if self.head is self.embedding else self.head.to(device),
        )

    @torch.inference_mode()
    def copy_(self, other: Weights) -> None:
        """Take the numbers of another version, and stay where it is in memory."""
        _copy(self, other)


Reader = Callable[[str], torch.Tensor]
"""Name of a parameter to its tensor."""


def from_checkpoint(
    checkpoint: Path, architecture: DecoderArchitecture, dtype: torch.dtype, device: torch.device
) -> Weights:
    """Read `model.safetensors`, or the shards that `model.safetensors.index.json` names.

    Raises:
        UserError: no weights, or weights that do not fit `config.json`.
    """
    file_of = _checked_files(checkpoint, architecture)

    def read(name: str) -> torch.Tensor:
        tensor: torch.Tensor = file_of[name].get_tensor(name)
        return tensor

    _check_tied(read, file_of.keys(), architecture)
    return build(read, file_of.keys(), architecture, dtype, device)


def check_checkpoint(checkpoint: Path, architecture: DecoderArchitecture) -> None:
    """Read the headers only; raises what `from_checkpoint` would."""
    _checked_files(checkpoint, architecture)


def _checked_files(checkpoint: Path, architecture: DecoderArchitecture) -> dict[str, Any]:
    """Parameter name to the open safetensors file that has it."""
    from safetensors import SafetensorError, safe_open

    file_of: dict[str, Any] = {}
    try:
        for shard in _shards(checkpoint):
            file: Any = safe_open(checkpoint / shard, framework="pt")
            file_of |= dict.fromkeys(file.keys(), file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{checkpoint}: unreadable weights: {error}") from error
    # Old Llama checkpoints store the rotary frequencies, which follow from config.json.
    file_of = {name: file for name, file in file_of.items() if not name.endswith(".inv_freq")}
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in file_of.items()}
    check(shapes, architecture, where=str(checkpoint))
    return file_of


def bucket_reader(
    manifest: WeightManifest,
    buckets: Sequence[Uint8 | torch.Tensor],
    architecture: DecoderArchitecture,
) -> tuple[Reader, Collection[str]]:
    """Reader of a version in the wire layout, and the names of its tensors.

    Raises:
        UserError: missing, unknown or misshapen tensors, a layout that leaves its bucket, or tied ones that differ.
    """
    where = f"weights {manifest.version} of {manifest.run!r}"
    check({spec.name: spec.shape for spec in manifest.tensors}, architecture, where=where)
    specs = {spec.name: spec for spec in manifest.tensors}
    for spec in manifest.tensors:
        _check_layout(spec, buckets, where)

    def read(name: str) -> torch.Tensor:
        spec = specs[name]
        data = buckets[spec.bucket][spec.offset : spec.offset + spec.nbytes]
        if isinstance(data, torch.Tensor):
            data = data.clone() if spec.offset % DTYPES[spec.dtype].itemsize else data
        else:  # torch refuses to promise not to write: a read-only view is copied
            data = torch.from_numpy(data if data.flags.writeable else np.array(data))
        return data.view(DTYPES[spec.dtype]).reshape(spec.shape)

    _check_tied(read, specs.keys(), architecture)
    return read, specs.keys()


def check(
    shapes: Mapping[str, tuple[int, ...]], architecture: DecoderArchitecture, *, where: str
) -> None:
    """Compare names and shapes with the model's; a tied `lm_head.weight` may be there or not.

    Raises:
        UserError: naming what is missing, unknown or misshapen.
    """
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith(UNREAD)}
    expected = dict(architecture.shapes(stacked=any(name.endswith(STACKED) for name in shapes)))
    if architecture.tied and HEAD in shapes:
        expected[HEAD] = expected[architecture.embedding]
    wrong = [
        f"{name} is {list(shapes[name])}, want {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    complaints = [
        _listed("missing", sorted(expected.keys() - shapes.keys())),
        _listed("unknown", sorted(shapes.keys() - expected.keys())),
        _listed("misshapen", wrong),
    ]
    found = "; ".join(complaint for complaint in complaints if complaint)
    if found:
        raise UserError(f"{where} do not fit {architecture.name}: {found}")


@torch.inference_mode()
def build(
    read: Reader,
    names: Collection[str],
    architecture: DecoderArchitecture,
    dtype: torch.dtype,
    device: torch.device,
) -> Weights:
    """Fuse the checked tensors that `read` gives into the decoder's, in `dtype` on `device`. Copies them."""
    own = _owner(read, dtype, device)
    embedding = own(architecture.embedding)
    untied = HEAD in names and not architecture.tied
    return Weights(
        embedding=embedding,
        layers=tuple(
            _layer(index, own, names, architecture) for index in range(architecture.num_layers)
        ),
        final_norm=_norm(own(f"{architecture.decoder}norm.weight"), architecture),
        head=own(HEAD) if untied else embedding,
    )


@torch.inference_mode()
def overwrite(
    live: Weights, read: Reader, names: Collection[str], architecture: DecoderArchitecture
) -> None:
    """Put the checked tensors that `read` gives into weights of the same shapes. Beside them it needs one layer."""
    own = _owner(read, live.embedding.dtype, live.embedding.device)
    live.embedding.copy_(read(architecture.embedding))
    if live.head is not live.embedding:
        live.head.copy_(read(HEAD))
    live.final_norm.copy_(_norm(own(f"{architecture.decoder}norm.weight"), architecture))
    for index, layer in enumerate(live.layers):
        _copy(layer, _layer(index, own, names, architecture))


def _copy(live: Any, fresh: Any) -> None:
    """Copy all tensors of one part of the model over those of the other."""
    for field in dataclasses.fields(live):
        into, value = getattr(live, field.name), getattr(fresh, field.name)
        if isinstance(into, torch.Tensor | RmsNorm):
            into.copy_(value)
        elif dataclasses.is_dataclass(into):
            _copy(into, value)
        elif isinstance(into, tuple):
            for one, other in zip(into, value, strict=True):
                _copy(one, other)


def _owner(read: Reader, dtype: torch.dtype, device: torch.device) -> Reader:
    def own(name: str) -> torch.Tensor:
        return read(name).to(device=device, dtype=dtype, copy=True)

    return own


def _check_tied(read: Reader, names: Collection[str], architecture: DecoderArchitecture) -> None:
    embedding = architecture.embedding
    if architecture.tied and HEAD in names and not torch.equal(read(HEAD), read(embedding)):
        raise UserError(
            f"{HEAD} differs from {embedding}, yet {architecture.name} ties them "
            "(tie_word_embeddings in config.json)"
        )


def _norm(weight: torch.Tensor, architecture: DecoderArchitecture) -> RmsNorm:
    return RmsNorm(weight + 1 if architecture.centred else weight, architecture.rms_norm_eps)


def _layer(
    index: int, own: Reader, names: Collection[str], architecture: DecoderArchitecture
) -> AttentionLayer | DeltaRuleLayer:
    prefix = f"{architecture.decoder}layers.{index}."
    rule = architecture.delta_rule_of(index)
    within = "self_attn.o_proj" if rule is None else "linear_attn.out_proj"
    has_bias = architecture.out_bias and rule is None
    alike: dict[str, Any] = {
        "input_norm": _norm(own(prefix + "input_layernorm.weight"), architecture),
        "out": own(f"{prefix}{within}.weight").t(),
        "out_bias": own(f"{prefix}{within}.bias") if has_bias else None,
        "post_norm": _norm(own(prefix + "post_attention_layernorm.weight"), architecture),
        "mlp": _mlp(prefix, own, names, architecture.mixture_of(index), bias=architecture.mlp_bias),
    }
    if rule is not None:
        return DeltaRuleLayer(**alike, rule=_rule(f"{prefix}linear_attn.", own, rule, architecture))
    return AttentionLayer(
        **alike,
        qkv=_qkv("weight", prefix, own, architecture),
        qkv_bias=_qkv("bias", prefix, own, architecture) if architecture.qkv_bias else None,
        qk_norm=_qk_norm(prefix, own, architecture) if architecture.qk_norm else None,
    )


def _rule(
    prefix: str, own: Reader, rule: DeltaRuleShape, architecture: DecoderArchitecture
) -> DeltaRule:
    return DeltaRule(
        shape=rule,
        projection=rule.joined(own, prefix),
        convolution=own(f"{prefix}conv1d.weight")[:, 0],
        decay=-own(f"{prefix}A_log").float().exp(),
        dt_bias=own(f"{prefix}dt_bias").float(),
        norm=RmsNorm(own(f"{prefix}norm.weight"), architecture.rms_norm_eps),
    )


def _qkv(what: str, prefix: str, own: Reader, architecture: DecoderArchitecture) -> torch.Tensor:
    """Weight or bias of queries, keys, values and gate."""
    query, key, value = (own(f"{prefix}self_attn.{part}_proj.{what}") for part in "qkv")
    gate = query[:0]
    if architecture.gated:
        halves = query.unflatten(0, (architecture.num_heads, 2, -1))  # type: ignore[no-untyped-call]
        query, gate = (half.flatten(0, 1) for half in halves.unbind(1))
    size = architecture.head_dim
    query, key = (
        _paired(part.reshape(-1, size, *part.shape[1:]), 1, architecture).flatten(0, 1)
        for part in (query, key)
    )
    return torch.cat([query, key, value, gate])


def _paired(heads: torch.Tensor, dim: int, architecture: DecoderArchitecture) -> torch.Tensor:
    """Numbers of heads in the order in which each is rotated with the one half a head behind it."""
    size, rotated = architecture.head_dim, architecture.rotated
    if rotated == size:
        return heads
    half = rotated // 2
    middle = (size + rotated) // 2
    order = [*range(half), *range(rotated, middle), *range(half, rotated), *range(middle, size)]
    return heads.index_select(dim, torch.tensor(order, device=heads.device))


def _qk_norm(prefix: str, own: Reader, architecture: DecoderArchitecture) -> RmsNorm:
    counts = (("q", architecture.num_heads), ("k", architecture.num_kv_heads))
    weights = [
        own(f"{prefix}self_attn.{part}_norm.weight").expand(count, -1) for part, count in counts
    ]
    return _norm(_paired(torch.cat(weights), 1, architecture), architecture)


def _mlp(
    prefix: str,
    own: Reader,
    names: Collection[str],
    mixture: ExpertMixture | None,
    *,
    bias: bool,
) -> DenseMlp | SparseMlp:
    if mixture is None:
        return _dense(f"{prefix}mlp.", own, bias=bias)
    if prefix + STACKED[0] in names:
        gate_up, down = (own(prefix + name) for name in STACKED)
    else:
        experts = [mixture.expert(index) for index in range(mixture.experts)]
        gate_up = torch.stack(
            [torch.cat([own(prefix + gate), own(prefix + up)]) for gate, up, _ in experts]
        )
        down = torch.stack([own(prefix + name) for _, _, name in experts])
    return SparseMlp(
        router=own(prefix + mixture.router()),
        gate_up=gate_up,
        down=down.mT,
        chosen=mixture.chosen,
        normalised=mixture.normalised,
        shared=_dense(f"{prefix}mlp.shared_expert.", own, bias=False)
        if mixture.shared_size
        else None,
        shared_gate=own(f"{prefix}mlp.shared_expert_gate.weight") if mixture.shared_size else None,
    )


def _dense(prefix: str, own: Reader, *, bias: bool) -> DenseMlp:
    gate, up, down = (f"{prefix}{name}_proj." for name in ("gate", "up", "down"))
    return DenseMlp(
        gate_up=torch.cat([own(gate + "weight"), own(up + "weight")]),
        gate_up_bias=torch.cat([own(gate + "bias"), own(up + "bias")]) if bias else None,
        down=own(down + "weight").t(),
        down_bias=own(down + "bias") if bias else None,
    )


def _check_layout(spec: TensorSpec, buckets: Sequence[Uint8 | torch.Tensor], where: str) -> None:
    if spec.dtype not in DTYPES:
        raise UserError(
            f"{where}: {spec.name} is {spec.dtype}, which is not supported ({', '.join(DTYPES)})"
        )
    want = int(np.prod(spec.shape)) * DTYPES[spec.dtype].itemsize
    if spec.nbytes != want:
        raise UserError(f"{where}: {spec.name} has {spec.nbytes} bytes, want {want}")
    if spec.bucket >= len(buckets):
        raise UserError(f"{where}: {spec.name} lies in bucket {spec.bucket} of {len(buckets)}")
    end, size = spec.offset + spec.nbytes, len(buckets[spec.bucket])
    if end > size:
        raise UserError(f"{where}: {spec.name} ends at {end} of a bucket of {size} bytes")


def _shards(checkpoint: Path) -> tuple[str, ...]:
    index = checkpoint / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (checkpoint / name).is_file()]
    if missing:
        raise UserError(f"{checkpoint} lacks {_some(missing)}")
    return tuple(names)


def _listed(what: str, names: Sequence[str]) -> str:
    return f"{what} {_some(names)}" if names else ""


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
