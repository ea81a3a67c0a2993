"""The base of every configuration class: frozen, strict, documented field by field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Unknown keys are refused.

    A docstring under a field is its documentation (`config explain`).
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )
