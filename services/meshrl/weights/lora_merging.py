"""Merges a LoRA adapter that arrived into this process's own copy of the base model, for the engine to stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meshrl.contract.errors import CorruptError, UserError
from meshrl.contract.types import Adapter, TensorSpec, Uint8, WeightManifest
from meshrl.weights.messages import digest, hashes_of, wrong_tensors

if TYPE_CHECKING:
    import torch

    from meshrl.trainer.model.lora import BaseModel


class Merger:
    """Opens the base model when the first adapter arrives: a run without LoRA never reads it."""

    def __init__(self, model_path: Path | None) -> None:
        self._path = model_path
        self._base: BaseModel | None = None

    def merge(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> list[Uint8]:
        """The buckets of `manifest.served`, bit for bit the trainer's. Blocks for as long as the model is large.

        Raises:
            UserError: this process has no base model, or another one.
            CorruptError: the merged weights have other hashes than the trainer's.
        """
        adapter = manifest.adapter
        assert adapter is not None
        base = self.base_of(adapter)
        parts = {
            # A copy, for torch would warn of read-only memory; adapters are small.
            spec.name: _tensor(
                spec, buckets[spec.bucket][spec.offset : spec.offset + spec.nbytes].copy()
            )
            for spec in manifest.tensors
        }
        served = adapter.merged
        merged_buckets = [np.empty(nbytes, dtype=np.uint8) for nbytes in served.bucket_bytes]
        for spec in served.tensors:
            target = merged_buckets[spec.bucket][spec.offset : spec.offset + spec.nbytes]
            _tensor(spec, target).copy_(_weight(base, spec, adapter, parts))
        for index, bucket in enumerate(merged_buckets):
            if digest(bucket) != served.bucket_hashes[index]:
                self._base = None  # its file may have changed since it was opened: open it again
                raise CorruptError(
                    f"weights {manifest.version}, merged here, are not what the trainer merged:"
                    f" {wrong_tensors(served, index, bucket, hashes_of(served)[index][1])}"
                )
        return merged_buckets

    def base_of(self, adapter: Adapter) -> BaseModel:
        """This process's copy of the base model. Raises UserError: it has none, or another one."""
        from meshrl.trainer.model.lora import (
            BaseModel,  # torch, which not every fleet needs here
        )

        if self._path is None:
            raise UserError("a LoRA adapter arrived, and this process has no model.path")
        if self._base is None:
            base = BaseModel(self._path)
            if base.fingerprint != adapter.base:
                raise UserError(
                    f"model.path {self._path} has the fingerprint {base.fingerprint}, the trainer's adapter belongs"
                    f" to {adapter.base}: put the same checkpoint there"
                )
            self._base = base
        return self._base


def _weight(
    base: BaseModel, spec: TensorSpec, adapter: Adapter, parts: dict[str, torch.Tensor]
) -> torch.Tensor:
    """float32, as the trainer has it before the cast."""
    from meshrl.trainer.model.lora import merged

    weight = base.tensor(spec.name).float()
    module, _, kind = spec.name.rpartition(".")
    if kind != "weight" or module not in adapter.targets:
        return weight
    a, b = (parts[f"{module}.lora_{side}.weight"] for side in "AB")
    return merged(weight, a, b, adapter.rank, adapter.scale)


def _tensor(spec: TensorSpec, data: Uint8) -> torch.Tensor:
    """A view of the bytes."""
    import torch

    return torch.from_numpy(data).view(getattr(torch, spec.dtype)).view(spec.shape)
