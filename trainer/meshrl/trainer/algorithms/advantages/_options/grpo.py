"""Options of `grpo`, which `gdpo`, `grpo_passk` and `grpo_vectorized` also read."""

from __future__ import annotations

from meshrl.common.config import Config


class Options(Config):
    """Keys of `algorithm`."""

    norm_adv_by_std_in_grpo: bool = True
    """Divide by the standard deviation of the group."""
