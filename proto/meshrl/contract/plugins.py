"""One new thing is one new file: find an implementation by its file name or by a dotted path."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import pkgutil
from pathlib import Path
from typing import Any

from meshrl.contract.errors import ConfigError


def known(package: str) -> tuple[str, ...]:
    """The names of the modules in `package`, sorted; a name that starts with `_` is not one."""
    path = importlib.import_module(package).__path__
    return tuple(sorted(info.name for info in pkgutil.iter_modules(path) if info.name[0] != "_"))


def load(package: str, name: str, attribute: str) -> Any:
    """The `attribute` of module `package.name`, or of the dotted path `name` from anywhere.

    Raises:
        ConfigError: no such module (lists the known names and the nearest) or no such attribute
        in it.
    """
    names = known(package)
    dotted = "." in name
    if not dotted and name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        kind = package.rpartition(".")[2]
        raise ConfigError(
            f"no {kind} named {name!r}{hint} (known: {', '.join(names)}, or a dotted path)"
        )
    try:
        module = importlib.import_module(name if dotted else f"{package}.{name}")
    except ModuleNotFoundError as error:
        raise ConfigError(f"cannot load {name!r}: {error}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"module {module.__name__!r} defines no {attribute!r}")
    return getattr(module, attribute)


def constant(package: str, name: str, attribute: str, default: Any) -> Any:
    """A literal that the module of `load` assigns at its top level, read without importing it.

    So a recipe can be checked where the module's own imports (torch) are not installed.
    """
    try:
        spec = importlib.util.find_spec(name if "." in name else f"{package}.{name}")
    except ModuleNotFoundError:
        return default
    if spec is None or spec.origin is None:
        return default
    for statement in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=found)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=found), value=ast.expr() as value)
            ) if found == attribute:
                return ast.literal_eval(value)
    return default
