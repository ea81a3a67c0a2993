"""Which kernel takes the rows of a pack end to end: torch's own, or that of an installed FlashAttention package.

    a long row             on Hopper GPUs and later, cuDNN's: 1.7 to 1.9 times as fast as FlashAttention 2

    torch 2.11 and later   its `varlen_attn`, FlashAttention 2; on Hopper GPUs (9.x) FlashAttention 3, if the
                           package `flash_attn_interface` is installed and this torch can be given its kernels
    before                 FlashAttention 2 of the package `flash_attn`, if that is installed
    neither                None: rows become rectangles

Layers that keep a state (linear attention, Mamba, convolutions) have kernels of flash-linear-attention, causal-conv1d
and mamba-ssm, which transformers calls where they are installed: `name_of_starts` tries whether they keep rows apart.

Torch: https://docs.pytorch.org/docs/stable/nn.attention.html. Run with torch 2.11 on an H200; the packages were not,
but flash-linear-attention 0.6, by Triton's interpreter.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations import hub_kernels

from meshrl.trainer.model.packing import bucket_length

try:
    from torch.nn.attention import varlen
except ImportError:  # before torch 2.10
    varlen = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)
_HOPPER = 9
FA2, FA3 = "flash_attn", "flash_attn_interface"
_STARTS = ("cu_seq_lens_q", "cu_seqlens")
"""Arguments in which transformers' layers take where rows begin; Kimi's hand the second on to the kernel."""
_TRIED_ROWS = (70, 30)
"""Tokens of the rows that layers are tried with: chunks of linear attention have 64."""
_ALIKE = 0.05
"""Share of the norm: above bfloat16's rounding, below the error of rows that see each other."""


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


@contextmanager
def without_kernels() -> Iterator[None]:
    """Let transformers compute by its own functions also where packages have kernels, which run on a GPU alone.

    It asks one question before each such kernel: is the model exported?
    """
    asks = "is_torchdynamo_exporting"
    before = getattr(hub_kernels, asks, None)
    setattr(hub_kernels, asks, lambda: True)
    try:
        yield
    finally:
        setattr(hub_kernels, asks, before)


def row_starts(name: str, cu_seqlens: torch.Tensor, tokens: int) -> dict[str, torch.Tensor]:
    """Arguments that tell a layer how rows of `tokens` tokens in all lie.

    Returns:
        As `name`, int32[rows + 1]: where they begin; as `seq_idx`, int32[1, tokens]: each token's row.
    """
    rows = torch.arange(len(cu_seqlens) - 1, dtype=torch.int32, device=cu_seqlens.device)
    numbers = torch.repeat_interleave(rows, cu_seqlens.diff(), output_size=tokens)
    return {name: cu_seqlens, "seq_idx": numbers[None]}


def name_of_starts(layer: Any, like: torch.Tensor) -> str:
    """Name for `row_starts` by which a layer keeps rows apart that lie end to end; empty where it lacks the kernels.

    Tried on a copy in which states last: it depends on transformers, on packages and on the GPU, and a layer may pass
    over its arguments in silence. `like` is [1, P, H] as the layer gets it.
    """
    # In a thread of its own: activation checkpointing around this forward would count what the trial computes.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_tried_name, layer, like).result()


@torch.no_grad()
def _tried_name(layer: Any, like: torch.Tensor) -> str:
    tried = copy.deepcopy(layer)
    for name, parameter in tried.named_parameters():
        if name.endswith("A_log"):
            parameter.fill_(-4.0)
    forward = functools.partial(type(layer).forward, tried)
    draw = torch.Generator(like.device).manual_seed(0)
    rows = like.new_empty(1, sum(_TRIED_ROWS), like.shape[-1]).normal_(generator=draw)
    ends = torch.tensor([0, *_TRIED_ROWS], device=like.device).cumsum(0, dtype=torch.int32)
    for name in _STARTS:
        try:
            found = forward(rows, **row_starts(name, ends, rows.shape[1]))
        except Exception as error:  # transformers' own where a package is missing, or a kernel's
            logger.debug("%s with %s: %s", type(layer).__name__, name, error)
            continue
        wanted = torch.cat([forward(row) for row in torch.split(rows, list(_TRIED_ROWS), 1)], 1)
        if (found - wanted).norm() < _ALIKE * wanted.norm():
            logger.info("%s: kernels that take rows end to end", type(layer).__name__)
            return name
    return ""


attend_varlen = with_grouped_heads(getattr(varlen, "varlen_attn", None)) or of_package()
"""Called as torch's `varlen_attn` with `scale` and `window_size`, whose second number is 0: causal."""
