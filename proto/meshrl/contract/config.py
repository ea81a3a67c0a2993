"""The base of every configuration class: frozen, strict, documented field by field."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


class Config(BaseModel):
    """Unknown keys are refused.

    A docstring under a field is its documentation (`config explain`).
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return pattern


RegularExpression = Annotated[str, AfterValidator(_compiles)]
"""A field with a pattern in Python's syntax, refused where it does not compile."""
