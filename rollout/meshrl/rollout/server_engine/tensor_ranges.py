"""Where the bytes of each tensor lie in the safetensors file of a staged version, for broadcasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrl.rollout.server_engine.checkpoint import read_header

TORCH_DTYPE = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRange:
    """One tensor and its byte range in the file."""

    name: str
    dtype: str
    """The safetensors name, such as BF16."""
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return self.end - self.start


def read_tensor_ranges(file: Path) -> list[TensorRange]:
    """The tensors of a safetensors file, in its order."""
    header, base = read_header(file)
    return sorted(
        (
            TensorRange(
                name=name,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                start=base + entry["data_offsets"][0],
                end=base + entry["data_offsets"][1],
            )
            for name, entry in header.items()
        ),
        key=lambda tensor: tensor.start,
    )


def aligned(tensors: Sequence[TensorRange]) -> tuple[TensorRange, ...]:
    """The widest items first: back to back, each tensor then begins at a multiple of its own item's size."""
    return tuple(sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype]))
