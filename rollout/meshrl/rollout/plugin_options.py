"""Reads a plug-in's options into its Config, and says in one line what is wrong with them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from pydantic import ValidationError

from meshrl.contract.config import Config
from meshrl.contract.errors import ConfigError

C = TypeVar("C", bound=Config)


def read_options(kind: type[C], options: Mapping[str, object], *, where: str) -> C:
    """Validate `options`; `where` is the recipe key they stand under.

    Raises:
        ConfigError: the first fault, with its key and, for an unknown one, the nearest right name.
    """
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"])
        if fault["type"] != "extra_forbidden":
            raise ConfigError(
                f"{where}.{key}: {fault['msg']} (got {fault['input']!r})", key=f"{where}.{key}"
            ) from error
        near = difflib.get_close_matches(key, kind.model_fields, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(kind.model_fields)}"
        raise ConfigError(f"{where}.{key}: no such option; {hint}", key=f"{where}.{key}") from error
