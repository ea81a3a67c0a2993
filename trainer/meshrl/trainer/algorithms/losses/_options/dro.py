"""Options of `dro`."""

from __future__ import annotations

from pydantic import PositiveFloat

from meshrl.common.config import Config


class Options(Config):
    """Keys of `actor.policy_loss`."""

    dro_beta: PositiveFloat | None = None
    """Required by `dro`."""
