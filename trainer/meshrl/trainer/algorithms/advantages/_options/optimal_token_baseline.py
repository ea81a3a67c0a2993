"""Options of `optimal_token_baseline` and `tir_optimal_token_baseline`."""

from __future__ import annotations

from meshrl.common.config import Config


class Options(Config):
    """Keys of `algorithm`."""

    otb_handle_zero_tail: bool = True
    """No baseline behind the second longest row of a group (optimal token baseline)."""
