"""The parameters as the decoder multiplies them: q, k, v in one matrix, gate and up in one matrix."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshrl.contract.errors import UserError
from meshrl.contract.types import TensorSpec, Uint8, WeightManifest
from meshrl.rollout.engines.torch.architecture import DecoderArchitecture, ExpertMixture
from meshrl.rollout.engines.torch.operations import DenseMlp, RmsNorm, SparseMlp

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
NAMES_SHOWN = 4
"""Names listed in an error before it says how many more there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One transformer layer. H query heads, K key heads, D head_dim, C hidden, F ffn."""

    input_norm: RmsNorm
    """[C]"""
    qkv: torch.Tensor
    """[(H + 2K) D, C]: queries, keys, values."""
    qkv_bias: torch.Tensor | None
    qk_norm: RmsNorm | None
    """[H + K, D]: the query norm for H rows, then the key norm for K."""
    out: torch.Tensor
    """[H D, C]: transposed, for addmm."""
    out_bias: torch.Tensor | None
    post_norm: RmsNorm
    """[C]"""
    mlp: DenseMlp | SparseMlp

    def to(self, device: torch.device) -> LayerWeights:
        """The same on `device`."""
        parts: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved = {name: part.to(device) for name, part in parts.items() if part is not None}
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A complete version of the model, immutable once built."""

    embedding: torch.Tensor
    """[V, C]"""
    layers: tuple[LayerWeights, ...]
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
    """What reads a version from the wire layout, and the names that are in it.

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
    expected = dict(architecture.shapes())
    if architecture.tied and "lm_head.weight" in shapes:
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
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
    embedding = own(EMBEDDING)
    untied = HEAD in names and not architecture.tied
    return Weights(
        embedding=embedding,
        layers=tuple(_layer(index, own, architecture) for index in range(architecture.num_layers)),
        final_norm=RmsNorm(own(FINAL_NORM), architecture.rms_norm_eps),
        head=own(HEAD) if untied else embedding,
    )


@torch.inference_mode()
def overwrite(live: Weights, read: Reader, architecture: DecoderArchitecture) -> None:
    """Put the checked tensors that `read` gives into weights of the same shapes. Beside them it needs one layer."""
    own = _owner(read, live.embedding.dtype, live.embedding.device)
    live.embedding.copy_(read(EMBEDDING))
    if live.head is not live.embedding:
        live.head.copy_(read(HEAD))
    live.final_norm.copy_(RmsNorm(own(FINAL_NORM), architecture.rms_norm_eps))
    for index, layer in enumerate(live.layers):
        _copy(layer, _layer(index, own, architecture))


def _copy(live: Any, fresh: Any) -> None:
    """All tensors of one part of the model over those of the other."""
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
    if architecture.tied and HEAD in names and not torch.equal(read(HEAD), read(EMBEDDING)):
        raise UserError(
            f"{HEAD} differs from {EMBEDDING}, yet {architecture.name} ties them "
            "(tie_word_embeddings in config.json)"
        )


def _layer(index: int, own: Reader, architecture: DecoderArchitecture) -> LayerWeights:
    prefix = f"model.layers.{index}."

    def joined(pattern: str, parts: Sequence[str]) -> torch.Tensor:
        return torch.cat([own(prefix + pattern.format(part)) for part in parts])

    def norm(weight: torch.Tensor) -> RmsNorm:
        return RmsNorm(weight, architecture.rms_norm_eps)

    qk_norm = None
    if architecture.qk_norm:
        counts = (("q", architecture.num_heads), ("k", architecture.num_kv_heads))
        parts = [
            own(f"{prefix}self_attn.{part}_norm.weight").expand(count, -1) for part, count in counts
        ]
        qk_norm = norm(torch.cat(parts))
    return LayerWeights(
        input_norm=norm(own(prefix + "input_layernorm.weight")),
        qkv=joined("self_attn.{}_proj.weight", "qkv"),
        qkv_bias=joined("self_attn.{}_proj.bias", "qkv") if architecture.qkv_bias else None,
        qk_norm=qk_norm,
        out=own(prefix + "self_attn.o_proj.weight").t(),
        out_bias=own(prefix + "self_attn.o_proj.bias") if architecture.out_bias else None,
        post_norm=norm(own(prefix + "post_attention_layernorm.weight")),
        mlp=_mlp(prefix, own, architecture.mixture_of(index), bias=architecture.mlp_bias),
    )


def _mlp(
    prefix: str, own: Reader, mixture: ExpertMixture | None, *, bias: bool
) -> DenseMlp | SparseMlp:
    if mixture is None:
        gate, up, down = (f"{prefix}mlp.{name}_proj." for name in ("gate", "up", "down"))
        return DenseMlp(
            gate_up=torch.cat([own(gate + "weight"), own(up + "weight")]),
            gate_up_bias=torch.cat([own(gate + "bias"), own(up + "bias")]) if bias else None,
            down=own(down + "weight").t(),
            down_bias=own(down + "bias") if bias else None,
        )
    experts = [mixture.expert(index) for index in range(mixture.experts)]
    return SparseMlp(
        router=own(prefix + mixture.router()),
        gate_up=torch.stack(
            [torch.cat([own(prefix + gate), own(prefix + up)]) for gate, up, _ in experts]
        ),
        down=torch.stack([own(prefix + down) for _, _, down in experts]).mT,
        chosen=mixture.chosen,
        normalised=mixture.normalised,
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
