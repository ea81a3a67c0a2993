"""The wire layout of a version of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.contract.nouns.names import Version


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
