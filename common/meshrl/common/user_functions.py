"""Loads user functions that a recipe names, by dotted path or by file."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from meshrl.common.plugins import find, where_it_stands
from meshrl.contract.errors import ConfigError


def load_function(name: str, key: str) -> Callable[..., Any]:
    """The function `package.module.function` or `path/to/file.py:function`.

    Raises:
        ConfigError: with the recipe's `key`: what cannot be imported and why.
    """
    place, attribute, in_file = _parts(name, key)
    try:
        module = _file(Path(place)) if in_file else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # user code may raise any error, or exit
        hint = where_it_stands(place) if isinstance(error, ModuleNotFoundError) else ""
        reason = f"{type(error).__name__}: {error}{hint}"
        raise ConfigError(f"{key}: cannot import {name!r}: {reason}", key=key) from error
    value = getattr(module, attribute, None)
    if not callable(value):
        what = "is not a function" if hasattr(module, attribute) else "is not there"
        raise ConfigError(f"{key}: {attribute!r} {what} in {place}", key=key)
    function: Callable[..., Any] = value
    return function


def check_function(name: str, key: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Check `name` as far as possible without importing the module. Returns its definition where it is plain to see.

    Raises:
        ConfigError: with `key`; no such file or module, it does not parse, or nothing in it has the name.
    """
    place, attribute, in_file = _parts(name, key)
    path = Path(place)
    if in_file and not path.is_file():
        raise ConfigError(f"{key}: no such file: {place}", key=key)
    if not in_file:
        spec = find(place)
        if spec is None:
            hint = where_it_stands(place)
            raise ConfigError(f"{key}: no module {place!r} can be imported{hint}", key=key)
        if spec.origin is None or not spec.origin.endswith(".py"):
            return None
        path = Path(spec.origin)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an odd escape in a string of the user's is harmless
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        reason = getattr(error, "msg", None) or str(error)
        raise ConfigError(f"{key}: {path}, line {line}: {reason}", key=key) from error
    bound = _bound_names(tree)
    if attribute not in bound and "*" not in bound:
        near = difflib.get_close_matches(attribute, bound, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{key}: {attribute!r} is not in {place}{hint}", key=key)
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() if (
                node.name == attribute and not node.decorator_list
            ):
                return node
    return None


def _bound_names(tree: ast.Module) -> set[str]:
    """Every name that a module may bind, by a definition, an assignment or an import; `*` for an import of all."""
    fields = ("name", "asname", "id")
    return {str(getattr(node, field, None)) for node in ast.walk(tree) for field in fields}


def _parts(name: str, key: str) -> tuple[str, str, bool]:
    """The module or file, the function, and whether it is a file."""
    in_file = ":" in name
    place, _, attribute = name.rpartition(":" if in_file else ".")
    if not place or not attribute:
        want = "want package.module.function or path/to/file.py:function"
        raise ConfigError(f"{key}: {name!r} names no function; {want}", key=key)
    return place, attribute, in_file


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
