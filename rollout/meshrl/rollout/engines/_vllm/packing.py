"""Which tensors go together in one broadcast, by the rule of vLLM's receiver.

The receiver walks the names that it was given and fills a bucket until its bytes are MORE than the agreed size: the
tensor that takes it over the edge is in (`packed_nccl_broadcast_consumer` in vLLM 0.33.0). It derives this by
itself, so the order of the names is all that can be chosen: inside a bucket wide items come before narrow ones,
because the receiver cuts the bytes back to back, and torch refuses a view of float32 at an odd offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from meshrl.rollout.server_engine.tensor_ranges import TORCH_DTYPE, TensorRange, aligned


def pack(tensors: Sequence[TensorRange], buffer_bytes: int) -> list[tuple[TensorRange, ...]]:
    """The buckets, as the receiver will cut them; nearly in the given order, which keeps layers together."""
    waiting = list(tensors)
    buckets: list[tuple[TensorRange, ...]] = []
    while waiting:
        count = _fill(waiting, buffer_bytes)
        ordered = aligned(waiting[:count])
        # Ordered anew it may overflow sooner: what is left over opens the next bucket.
        used = _fill(ordered, buffer_bytes)
        buckets.append(ordered[:used])
        waiting[:count] = ordered[used:]
    return buckets


def update_info(buckets: Sequence[Sequence[TensorRange]]) -> dict[str, list[object]]:
    """The body of `/update_weights`: what comes, in its order."""
    tensors = [tensor for bucket in buckets for tensor in bucket]
    return {
        "names": [tensor.name for tensor in tensors],
        "dtype_names": [TORCH_DTYPE[tensor.dtype] for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
    }


def _fill(tensors: Sequence[TensorRange], buffer_bytes: int) -> int:
    """How many of the first tensors make a bucket."""
    sizes = accumulate(tensor.nbytes for tensor in tensors)
    return next(
        (number for number, size in enumerate(sizes, 1) if size > buffer_bytes), len(tensors)
    )
