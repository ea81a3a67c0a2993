"""Stands for SGLang's CPU kernels, which no package index has: their names can be imported, not called."""

from collections.abc import Callable
from typing import Any

import torch

OPERATIONS = torch.library.Library("sgl_kernel", "DEF")
"""Operations that `sglang.srt.models.qwen3_5` needs, which the processor of Qwen's images imports."""
for operation in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    OPERATIONS.define(f"{operation}() -> ()")


def missing(name: str) -> Callable[..., Any]:
    """A kernel that raises when it is called."""

    def call(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not built for this CPU")

    return call


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    return missing(name)
