"""Which tensors go together in one broadcast, by the rule of vLLM's receiver.

The receiver walks the names that it was given and fills a bucket until its bytes are MORE than the agreed size: the
tensor that takes it over the edge is in (`packed_nccl_broadcast_consumer` in vLLM 0.33.0). It derives this by
itself, so the order of the names is all that can be chosen: inside a bucket wide items come before narrow ones,
because the receiver cuts the bytes back to back, and torch refuses a view of float32 at an odd offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from meshrl.rollout.engines._server.tensor_ranges import TORCH_DTYPE, Piece, aligned


def pack(pieces: Sequence[Piece], buffer_bytes: int) -> list[tuple[Piece, ...]]:
    """The buckets, as the receiver will cut them; nearly in the given order, which keeps layers together."""
    waiting = list(pieces)
    buckets: list[tuple[Piece, ...]] = []
    while waiting:
        count = _fill(waiting, buffer_bytes)
        ordered = aligned(waiting[:count])
        # Ordered anew it may overflow sooner: what is left over opens the next bucket.
        used = _fill(ordered, buffer_bytes)
        buckets.append(ordered[:used])
        waiting[:count] = ordered[used:]
    return buckets


def update_info(buckets: Sequence[Sequence[Piece]]) -> dict[str, list[object]]:
    """The body of `/update_weights`: what comes, in its order."""
    pieces = [piece for bucket in buckets for piece in bucket]
    return {
        "names": [piece.name for piece in pieces],
        "dtype_names": [TORCH_DTYPE[piece.dtype] for piece in pieces],
        "shapes": [list(piece.shape) for piece in pieces],
    }


def _fill(pieces: Sequence[Piece], buffer_bytes: int) -> int:
    """How many of the first pieces make a bucket."""
    sizes = accumulate(piece.nbytes for piece in pieces)
    return next(
        (number for number, size in enumerate(sizes, 1) if size > buffer_bytes), len(pieces)
    )
