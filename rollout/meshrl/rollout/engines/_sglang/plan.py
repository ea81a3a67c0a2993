"""Which tensors of a staged version go together in one broadcast, and the body that tells SGLang of it.

A flattened bucket is one run of bytes; the receiver cuts it where names, dtypes and shapes say, and refuses a tensor
that begins where its dtype cannot (`Unaligned received tensor`). So tensors of a bucket are ordered by item size, the
widest first: each then begins at a multiple of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshrl.rollout.engines._server.tensor_ranges import TORCH_DTYPE, Piece, aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Tensors of one broadcast, in its order."""

    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Of the broadcast."""
        return sum(piece.end - piece.start for piece in self.pieces)


def plan(pieces: Sequence[Piece], bucket_bytes: int) -> list[Bucket]:
    """Buckets of up to `bucket_bytes` (or one larger tensor), in the file's order, aligned inside."""
    buckets: list[Bucket] = []
    current: list[Piece] = []
    size = 0
    for piece in pieces:
        nbytes = piece.end - piece.start
        if current and size + nbytes > bucket_bytes:
            buckets.append(Bucket(pieces=aligned(current)))
            current, size = [], 0
        current.append(piece)
        size += nbytes
    return [*buckets, Bucket(pieces=aligned(current))] if current else buckets


def update_body(bucket: Bucket, *, group: str, label: str | None) -> dict[str, Any]:
    """Of `/update_weights_from_distributed`. `label` with the last bucket only: each call would record it."""
    return {
        "names": [piece.name for piece in bucket.pieces],
        "dtypes": [TORCH_DTYPE[piece.dtype] for piece in bucket.pieces],
        "shapes": [list(piece.shape) for piece in bucket.pieces],
        "group_name": group,
        "load_format": "flattened_bucket",
        "weight_version": label,
        "flush_cache": False,
    }
