"""`torch`, imported when a formula first computes: the options beside it are read where torch is not installed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["Tensor", "torch"]

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("torch"), name)

    torch, Tensor = _Torch(), Any
