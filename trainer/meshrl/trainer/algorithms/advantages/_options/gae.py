"""Options of `gae`."""

from __future__ import annotations

from meshrl.common.config import Config


class Options(Config):
    """Keys of `algorithm`."""

    lam: float = 1.0
    """λ of GAE: 1 takes whole returns, 0 one-step differences."""
