"""The base of every configuration class (frozen, strict, documented field by field), and the options of plug-ins."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from meshrl.contract.errors import ConfigError


class Config(BaseModel):
    """Unknown keys are refused.

    A docstring under a field is its documentation (`config explain`).
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )


C = TypeVar("C", bound=Config)


class Machine(Protocol):
    """What the check of a recipe asks of the machine that will run it.

    Options of a plug-in that depend on it have a method `faults(machine, model)`, which yields pairs of an option
    (empty: the plug-in as a whole) and a sentence. It may look, and never load or start anything.
    """

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        ...

    def installed(self, package: str) -> bool:
        """Whether a package of this name can be imported."""
        ...

    def program(self, name: str) -> bool:
        """Whether `name`, a path or a word on PATH, can be run."""
        ...

    def json(self, path: Path) -> Mapping[str, Any]:
        """The object in a file; empty where there is none."""
        ...


def read_options(kind: type[C], options: Mapping[str, object], *, where: str) -> C:
    """Read a plug-in's `options` into its Config class; `where` is the recipe key that holds them.

    Raises:
        ConfigError: the first fault, with its key and, for an unknown key, the nearest known one.
    """
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"])
        if fault["type"] != "extra_forbidden":
            whole = ".".join(filter(None, (where, key)))
            message = fault["msg"].removeprefix("Value error, ")
            raise ConfigError(f"{whole}: {message} (got {fault['input']!r})", key=whole) from error
        near = difflib.get_close_matches(key, kind.model_fields, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(kind.model_fields)}"
        raise ConfigError(f"{where}.{key}: no such option; {hint}", key=f"{where}.{key}") from error


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return pattern


RegularExpression = Annotated[str, AfterValidator(_compiles)]
"""A field with a pattern in Python's syntax, refused where it does not compile."""
