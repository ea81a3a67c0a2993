"""A batch as tensors: concatenated rows, copied once from the received frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from meshrl.client.batches import TrainBatch
from meshrl.contract.frames import Flat
from meshrl.contract.types import BatchRow


@dataclass(frozen=True, eq=False, kw_only=True)
class RaggedTensor:
    """Rows of different lengths on one axis: row i is `values[offsets[i]:offsets[i + 1]]`."""

    values: Tensor
    """[N, ...] in the column's dtype, N = sum of the lengths."""
    lengths: Tensor
    """int64[B]"""

    @property
    def offsets(self) -> Tensor:
        """int64[B + 1], as `torch.nested.nested_tensor_from_jagged` and varlen attention take it."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    def padded(self, fill: float = 0) -> Tensor:
        """[B, T, ...], T the length of the longest row. Rows are padded on the right with `fill`."""
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        shape = (len(self.lengths), longest, *self.values.shape[1:])
        padded = self.values.new_full(shape, fill)
        padded[self.padding_mask(longest)] = self.values
        return padded

    def padding_mask(self, length: int) -> Tensor:
        """bool[B, length]: True where a row has an entry."""
        positions = torch.arange(length, device=self.lengths.device)
        return positions < self.lengths[:, None]

    def split(self) -> tuple[Tensor, ...]:
        """The rows as views."""
        return torch.split(self.values, self.lengths.tolist())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> RaggedTensor:
        """The same on a device."""
        return RaggedTensor(
            values=self.values.to(device, non_blocking=non_blocking),
            lengths=self.lengths.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> RaggedTensor:
        """The same in pinned memory. A DataLoader with `pin_memory=True` calls this."""
        return RaggedTensor(values=self.values.pin_memory(), lengths=self.lengths.pin_memory())


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorBatch:
    """B rows of complete groups (of this rank's share): `batch["tokens"].padded()`."""

    epoch: int
    step: int
    """The optimizer step that the batch is for: the argument of `settle`."""
    rows: tuple[BatchRow, ...]
    """Uid, versions, outcome and actual group size of each row."""
    groups: Tensor
    """int64[B]: 0, 1, … in order; rows of one group share a number."""
    columns: Mapping[str, RaggedTensor]
    """Empty if this rank has no row."""

    def __getitem__(self, name: str) -> RaggedTensor:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.rows)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TensorBatch:
        """The same on a device."""
        moved = {k: c.to(device, non_blocking=non_blocking) for k, c in self.columns.items()}
        groups = self.groups.to(device, non_blocking=non_blocking)
        return replace(self, groups=groups, columns=moved)

    def pin_memory(self) -> TensorBatch:
        """The same in pinned memory."""
        pinned = {name: column.pin_memory() for name, column in self.columns.items()}
        return replace(self, groups=self.groups.pin_memory(), columns=pinned)


def to_tensors(batch: TrainBatch, names: tuple[str, ...]) -> TensorBatch:
    """The columns `names` of a batch, none if it has no rows. Raises CorruptError if a row lacks one."""
    number: dict[str, int] = {}
    groups = [number.setdefault(row.group, len(number)) for row in batch.rows]
    return TensorBatch(
        epoch=batch.epoch,
        step=batch.step,
        rows=batch.rows,
        groups=torch.tensor(groups, dtype=torch.int64),
        columns={k: _ragged(flat) for k, flat in batch.flat(names).items()} if batch.rows else {},
    )


def _ragged(flat: Flat) -> RaggedTensor:
    lengths = np.ones(len(flat.values)) if flat.lengths is None else flat.lengths
    return RaggedTensor(
        values=torch.from_numpy(flat.values), lengths=torch.from_numpy(lengths.astype(np.int64))
    )
