"""Which kernel takes the rows of a pack end to end: torch's own, or that of an installed FlashAttention package.

    torch 2.11 and later   its `varlen_attn`, FlashAttention 2; on Hopper GPUs (9.x) FlashAttention 3, if the
                           package `flash_attn_interface` is installed and this torch can be given its kernels
    before                 FlashAttention 2 of the package `flash_attn`, if that is installed
    neither                None: rows become rectangles

Torch: https://docs.pytorch.org/docs/stable/nn.attention.html. Not run on a GPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
from typing import Any

import torch

try:
    from torch.nn.attention import varlen
except ImportError:  # before torch 2.10
    varlen = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)
_HOPPER = 9
FA2, FA3 = "flash_attn", "flash_attn_interface"


def with_grouped_heads(attend: Any | None) -> Any | None:
    """Torch's `varlen_attn` as this torch has it, for heads of keys that may be fewer; None where it cannot do it.

    2.10 knows no window. 2.11 has no `enable_gqa`: it hands unequal heads to the kernel, which takes them. Later ones
    refuse them without it.
    """
    if attend is None:
        return None
    known = inspect.signature(attend).parameters
    if not {"scale", "window_size"} <= known.keys():
        return None
    if "enable_gqa" not in known:
        return attend

    @functools.wraps(attend)
    def grouped(q: torch.Tensor, k: torch.Tensor, *others: Any, **options: Any) -> Any:
        return attend(q, k, *others, **options, enable_gqa=q.shape[1] != k.shape[1])

    return grouped


def of_package() -> Any | None:
    """`flash_attn_varlen_func` of FlashAttention 2's package, called as torch's; None where it cannot be loaded."""
    if importlib.util.find_spec(FA2) is None:
        return None
    try:
        attend = importlib.import_module(FA2).flash_attn_varlen_func
    except (ImportError, OSError, AttributeError) as error:  # built for another torch
        logger.warning("the package %s is installed and cannot be used: %s", FA2, error)
        return None

    def called(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor,
        max_q: int, max_k: int, *, scale: float | None, window_size: tuple[int, int],
    ) -> Any:  # fmt: skip
        return attend(
            *(q, k, v, cu_q, cu_k, max_q, max_k),
            softmax_scale=scale,
            causal=True,
            window_size=window_size,
        )

    return called


def use_flash_attention_3(major: int, attention: Any = torch.nn.attention) -> bool:
    """Give torch the kernels of FlashAttention 3, if they are for this GPU and installed; whether it has them."""
    activate = getattr(attention, "activate_flash_attention_impl", None)
    if major != _HOPPER or activate is None or importlib.util.find_spec(FA3) is None:
        return False
    try:
        activate("FA3")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        logger.warning("the package %s is installed and cannot be used: %s", FA3, error)
        return False
    logger.info("attention: FlashAttention 3")
    return True


attend_varlen = with_grouped_heads(getattr(varlen, "varlen_attn", None)) or of_package()
"""Called as torch's `varlen_attn` with `scale` and `window_size`, whose second number is 0: causal."""
