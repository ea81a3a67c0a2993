"""Which kernel takes the rows of a pack end to end: torch's own, or that of an installed FlashAttention package.

    a long row             on Hopper GPUs and later, cuDNN's: 1.7 to 1.9 times as fast as FlashAttention 2

    torch 2.11 and later   its `varlen_attn`, FlashAttention 2; on Hopper GPUs (9.x) FlashAttention 3, if the
                           package `flash_attn_interface` is installed and this torch can be given its kernels
    before                 FlashAttention 2 of the package `flash_attn`, if that is installed
    neither                None: rows become rectangles

Torch: https://docs.pytorch.org/docs/stable/nn.attention.html. Run with torch 2.11 on an H200; the packages were not.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshrl.trainer.model.packing import bucket_length

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
            q,
            k,
            v,
            cu_q,
            cu_k,
            max_q,
            max_k,
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
    takes_every_row.append(FA3)
    return True


takes_every_row: list[str] = []
"""Kernels in use that are as fast as cuDNN on rows of any length."""


def takes_long_rows(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether `attend_row` can take rows of these [T, H, D]."""
    size = query.shape[-1]
    if takes_every_row or size > 128 or size % 8:
        return False
    return _cudnn_works(query.device, query.dtype, query.shape[1] != key.shape[1], size)


@functools.cache
def _cudnn_works(device: torch.device, dtype: torch.dtype, grouped: bool, size: int) -> bool:
    """Tried, forward and backward, for it depends on the GPU, cuDNN and torch."""
    if torch.cuda.get_device_capability(device)[0] < _HOPPER:
        return False

    def tried() -> RuntimeError | None:
        heads = (2, 1, 1) if grouped else (2, 2, 2)
        rows = [
            torch.ones(64, h, size, dtype=dtype, device=device, requires_grad=True) for h in heads
        ]
        try:
            torch.autograd.grad(attend_row(rows[0], rows[1], rows[2], None).sum(), rows)
        except RuntimeError as error:
            return error
        return None

    # In a thread of its own: activation checkpointing around this forward would count the tensors of the trial.
    with ThreadPoolExecutor(1) as thread:
        error = thread.submit(tried).result()
    if error is not None:
        logger.warning("attention: cuDNN's cannot be used for long rows: %s", error)
    return error is None


def attend_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """[T, Hq, D] of one row's [T, Hq, D] and twice [T, Hkv, D], by cuDNN.

    It prepares each length anew, so lengths are rounded up: what is behind the end, no token before it sees.
    """
    tokens = len(query)
    if more := bucket_length(tokens) - tokens:
        query, key, value = (F.pad(x, (0, 0, 0, 0, 0, more)) for x in (query, key, value))
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
        )
    return out[0, :, :tokens].transpose(0, 1)


attend_varlen = with_grouped_heads(getattr(varlen, "varlen_attn", None)) or of_package()
"""Called as torch's `varlen_attn` with `scale` and `window_size`, whose second number is 0: causal."""
