"""Two operations that torch offers ready made, written out for float32 on a CPU, where that is faster.

Shapes: n rows, K key heads, G query heads to a key head, L attended positions, D head_dim.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def rms_norm(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`values / sqrt(mean(values²) + eps) * weight`, the mean over the last axis; `weight` may be broadcast.

    On a CPU torch's own is eight small operations; these are five (a norm is one).
    """
    size = values.shape[-1]
    if not _plain(values):
        if weight.dim() == 1:
            return F.rms_norm(values, (size,), weight, eps)
        return F.rms_norm(values, (size,), None, eps) * weight
    norm: torch.Tensor = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    scale = norm.square_().div_(size).add_(eps).rsqrt_()
    return (values * scale).mul_(weight)


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Softmax attention of a few queries a row.

    The query heads that share a key head stand as a sequence of queries: no key is repeated. On a CPU torch's own
    (flash attention) takes up to twice as long for so few of them.

    Args:
        queries: [n, K G, D]
        keys: [n, K, L, D]
        values: [n, K, L, D]
        mask: [n K, 1, L], added to the scaled scores.

    Returns:
        [n, K G D]
    """
    count, heads, length, size = keys.shape
    queries = queries.reshape(count * heads, -1, size)
    if _plain(queries):
        scores = torch.baddbmm(
            mask, queries, keys.reshape(-1, length, size).mT, alpha=1 / math.sqrt(size)
        )
        attended = torch.bmm(scores.softmax(-1), values.reshape(-1, length, size))
    else:
        attended = F.scaled_dot_product_attention(
            queries.view(count, heads, -1, size),
            keys,
            values,
            attn_mask=mask.view(count, heads, 1, length),
        )
    return attended.reshape(count, -1)


def _plain(values: torch.Tensor) -> bool:
    return values.is_cpu and values.dtype is torch.float32
