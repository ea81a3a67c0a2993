"""The layout in which a version of the weights is sent."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.contract.types.rows import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Where one tensor lies in the layout of a version."""

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
    """xxh3-64 of each tensor, to say which one is wrong; empty where nobody made them."""
    adapter: Adapter | None = None
    """What is sent is a LoRA adapter, to be merged before an engine sees it; None: whole weights."""

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
    """What comes out, hashes included."""
