"""Options of the loss `sppo`."""

from __future__ import annotations

from pydantic import PositiveFloat

from meshrl.common.config import Config


class Options(Config):
    """Keys of `actor.policy_loss`."""

    sppo_eta: PositiveFloat = 1.0
    """Scale of the advantage that a row's log-ratio is regressed on."""
