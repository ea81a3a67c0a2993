"""Functions of a user's own, named in a recipe: by dotted path, or in a file of theirs."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from meshrl.contract.errors import ConfigError


def load_function(name: str, key: str) -> Callable[..., Any]:
    """The function `package.module.function` or `path/to/file.py:function`.

    Raises:
        ConfigError: with the recipe's `key`: what cannot be imported, why, and what would be right.
    """
    place, colon, attribute = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not place or not attribute:
        want = "want package.module.function or path/to/file.py:function"
        raise ConfigError(f"{key}: {name!r} names no function; {want}", key=key)
    try:
        module = _file(Path(place)) if colon == ":" else importlib.import_module(place)
    except Exception as error:  # it is a program, and raises what it likes
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{key}: cannot import {name!r}: {reason}", key=key) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        what = "is no function" if hasattr(module, attribute) else "is not there"
        raise ConfigError(f"{key}: {attribute!r} {what} in {place}", key=key)
    function: Callable[..., Any] = found
    return function


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    # A name that no import statement can mean; dataclasses and pickle look their module up under it.
    spec = importlib.util.spec_from_file_location(f"file:{path.resolve()}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
