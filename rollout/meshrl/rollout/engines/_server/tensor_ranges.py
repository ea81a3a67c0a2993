"""The tensors of a staged version as runs of bytes in its file: what a broadcast is made of."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TORCH_DTYPE = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor, and where its bytes lie in the file."""

    name: str
    dtype: str
    """In safetensors' words."""
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return self.end - self.start


def read_pieces(file: Path) -> list[Piece]:
    """The tensors of a safetensors file, in its order."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    base = 8 + length
    return sorted(
        (
            Piece(
                name=name,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                start=base + entry["data_offsets"][0],
                end=base + entry["data_offsets"][1],
            )
            for name, entry in header.items()
        ),
        key=lambda piece: piece.start,
    )


def aligned(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The widest items first: back to back, each tensor then begins at a multiple of its own item's size."""
    return tuple(sorted(pieces, key=lambda piece: -ITEM_BYTES[piece.dtype]))
