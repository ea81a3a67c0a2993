"""Rounds log-probs so that a float32 column holds 16-bit values, which compress to half the bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from meshrl.contract.types import RowWrite

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
LOGPROBS: Final = ("rollout_logprobs", "ref_logprobs", "ref_top_logprobs")
"""The columns that may be rounded."""


def with_rounded_logprobs(row: RowWrite, precision: Precision) -> RowWrite:
    """The row with log-probs of that precision."""
    found = {
        name: rounded(row.columns[name], precision) for name in LOGPROBS if name in row.columns
    }
    return replace(row, columns={**row.columns, **found})


def rounded(logprobs: npt.NDArray[np.float32], precision: Precision) -> npt.NDArray[np.float32]:
    """float32[R] of the same shape, rounded to what 16 bits hold (ties to even).

    The error is at most 2^-9 of the value in bf16 and 2^-11 in fp16: for log-probs above -16 below 0.031 and 0.0078.
    """
    if precision == "fp32":
        return logprobs
    if precision == "fp16":
        # Beyond the range of fp16 only -inf and what no sampler draws.
        return logprobs.clip(-65504, 65504).astype(np.float16).astype(np.float32)
    bits = logprobs.view(np.uint32)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(logprobs), even.view(np.float32), logprobs)
