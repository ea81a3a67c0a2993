"""DAPO's soft penalty for responses that come close to the length limit.

Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 13. With n the response's tokens, L_max the limit and the last
`buffer` tokens before it:

    penalty = min(0, -(n - (L_max - buffer)) / buffer · factor)
"""

from __future__ import annotations

from torch import Tensor


def overlong_penalty(
    lengths: Tensor, *, max_response_length: int, buffer: int, factor: float = 1.0
) -> Tensor:
    """What to add to the rewards, float32[B] and never positive; `lengths` int64[B] in tokens."""
    over = lengths - (max_response_length - buffer)
    return (-over / buffer * factor).clamp(max=0)
