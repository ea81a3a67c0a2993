"""Loads user functions that a recipe names, by dotted path or by file."""

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
        ConfigError: with the recipe's `key`: what cannot be imported and why.
    """
    place, attribute, in_file = _parts(name, key)
    try:
        module = _file(Path(place)) if in_file else importlib.import_module(place)
    except Exception as error:  # user code may raise any error
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{key}: cannot import {name!r}: {reason}", key=key) from error
    value = getattr(module, attribute, None)
    if not callable(value):
        what = "is no function" if hasattr(module, attribute) else "is not there"
        raise ConfigError(f"{key}: {attribute!r} {what} in {place}", key=key)
    function: Callable[..., Any] = value
    return function


def check_function(name: str, key: str) -> None:
    """Check `name` as far as possible without importing the module.

    Raises:
        ConfigError: with `key`; no such file or module.
    """
    place, _, in_file = _parts(name, key)
    if in_file and not Path(place).is_file():
        raise ConfigError(f"{key}: no such file: {place}", key=key)
    if not in_file and not _importable(place):
        raise ConfigError(f"{key}: no module {place!r} can be imported", key=key)


def _parts(name: str, key: str) -> tuple[str, str, bool]:
    """The module or file, the function, and whether it is a file."""
    in_file = ":" in name
    place, _, attribute = name.rpartition(":" if in_file else ".")
    if not place or not attribute:
        want = "want package.module.function or path/to/file.py:function"
        raise ConfigError(f"{key}: {name!r} names no function; {want}", key=key)
    return place, attribute, in_file


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    # A name that no import statement can use; dataclasses and pickle look up their module by it.
    spec = importlib.util.spec_from_file_location(f"file:{path.resolve()}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
