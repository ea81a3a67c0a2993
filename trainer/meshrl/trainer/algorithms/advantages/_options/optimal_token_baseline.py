"""Options of `optimal_token_baseline` and `tir_optimal_token_baseline`."""

from __future__ import annotations

from pydantic import Field

from meshrl.common.config import Config


class Options(Config):
    """Keys of `algorithm`."""

    otb_handle_zero_tail: bool = Field(default=True, exclude=True)
    """No baseline behind the second longest row of a group (optimal token baseline)."""
