"""Soft punishment of overlong responses, as in DAPO (https://arxiv.org/abs/2503.14476, section 3.4, equation 13).

    penalty = min(0, -(n - (max_length - buffer)) / buffer · factor)

0 up to `max_length - buffer`, then falling linearly to `-factor` at `max_length`, and on beyond it. Add it to a
reward for correctness with `reward.functions`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from meshrl.common import config
from meshrl.contract.errors import UserError
from meshrl.contract.types import Json


class Config(config.Config):
    """Start and slope of the length penalty."""

    max_length: PositiveInt = 512
    """Usually `data.max_response_length`."""
    buffer: PositiveInt = 128
    """The punishment begins this much before `max_length`."""
    factor: NonNegativeFloat = 1.0
    """The punishment at `max_length`."""
    unit: Literal["tokens", "characters"] = "tokens"
    """Tokens are counted by the mesh (`extra_info.response_length`)."""

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if self.buffer > self.max_length:
            raise ValueError(f"buffer {self.buffer} exceeds max_length {self.max_length}")
        return self


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Json,
    extra_info: Json = None,
    config: Config = Config(),  # noqa: B008 - frozen
) -> dict[str, float]:
    """The punishment, with the length as a component.

    Raises:
        UserError: `unit` is tokens, and `extra_info` has no count.
    """
    if config.unit == "characters":
        length = len(solution_str)
    elif extra_info and "response_length" in extra_info:
        length = int(extra_info["response_length"])
    else:
        raise UserError(
            "reward 'length' counts tokens, and extra_info has no response_length (or set unit: characters)"
        )
    excess = length - (config.max_length - config.buffer)
    return {
        "score": min(-excess / config.buffer * config.factor, 0.0),
        "response_length": float(length),
    }
