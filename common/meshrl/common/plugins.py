"""Finds an implementation by its file name or by a dotted path: one new thing is one new file."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from importlib.machinery import ModuleSpec
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from meshrl.contract.errors import ConfigError

DISTRIBUTIONS = {
    "PIL": "pillow",
    "cupy": "cupy-cuda13x",
    "mlflow": "mlflow-skinny",
    "tokenizers": "transformers",
    "huggingface_hub": "transformers",
    "jinja2": "transformers",
}
"""Modules to the distribution that brings them, where its name is another one."""
DOUBLES = "meshrl.testing"
"""Its packages are searched after the one of the same name: a recipe may name an engine for tests."""


def known(package: str) -> tuple[str, ...]:
    """The names of the modules in `package` and of its test doubles, sorted; `_private` ones are left out.

    `ALIASES` of the package, name to module, are further names of its modules.
    """
    return tuple(sorted(modules(package)))


@functools.cache
def modules(package: str) -> Mapping[str, str]:
    """Name to the full name of its module. A process sees the files that were there when it first asked."""
    found: dict[str, str] = {}
    for place in (f"{DOUBLES}.{package.rpartition('.')[2]}", package):
        if place == package or importlib.util.find_spec(place) is not None:
            holder = importlib.import_module(place)
            names = {info.name: info.name for info in pkgutil.iter_modules(holder.__path__)}
            names |= getattr(holder, "ALIASES", {})
            found |= {name: f"{place}.{module}" for name, module in names.items()}
    return {name: module for name, module in found.items() if name[0] != "_"}


def load(package: str, name: str, attribute: str) -> Any:
    """The `attribute` of module `package.name`, or of the dotted path `name` from anywhere.

    Raises:
        ConfigError: no such module (lists the known names and the nearest), one whose import fails, or no such
        attribute in it.
    """
    named = modules(package)
    if "." not in name and name not in named:
        raise unknown(package.rpartition(".")[2], name, sorted(named))
    return _attribute(named.get(name, name), name, attribute)


def _attribute(module_name: str, name: str, attribute: str) -> Any:
    """The `attribute` of a module, which messages call `name`."""
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        cure = where_it_stands(name) or (f"; {install}" if (install := to_install(error)) else "")
        raise ConfigError(f"cannot load {name!r}: {error}{cure}") from error
    except (Exception, SystemExit) as error:  # someone's own module may raise anything, or exit
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"cannot load {name!r}: its import ended with {reason}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"module {module.__name__!r} defines no {attribute!r}")
    return getattr(module, attribute)


def unknown(kind: str, name: str, names: Collection[str]) -> ConfigError:
    """The error of a name that is none of `names`: it lists them and the nearest."""
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ConfigError(
        f"no {kind} named {name!r}{hint} (known: {', '.join(names)}, or a dotted path)"
    )


def find(name: str) -> ModuleSpec | None:
    """The module of a dotted name, found without importing it or the packages that hold it; None: there is none."""
    spec, search = None, None
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    for full in accumulate(parts, "{}.{}".format):
        if full in sys.modules:
            spec = sys.modules[full].__spec__
            search = getattr(sys.modules[full], "__path__", None)
            continue
        spec = _found(full, search)
        search = spec.submodule_search_locations if spec is not None else None
    return spec


def to_install(error: ModuleNotFoundError) -> str:
    """The command that brings what an import has not found; empty where no extra of meshrl does."""
    module = (error.name or "").partition(".")[0]
    wanted = DISTRIBUTIONS.get(module, module.replace("_", "-"))
    try:
        required = importlib.metadata.requires("meshrl") or ()
    except importlib.metadata.PackageNotFoundError:
        return ""
    for line in required:
        found = re.match(r"([\w.-]+)[^;]*;.*extra == ['\"]([\w-]+)['\"]", line)
        if found and found[1] == wanted and found[2] != "dev":
            return f"pip install 'meshrl[{found[2]}]'"
    return ""


def _found(name: str, search: Iterable[str] | None) -> ModuleSpec | None:
    """A module of the top level, or of a package with the folders `search`."""
    if "." not in name:
        return importlib.util.find_spec(name)
    finders = map(pkgutil.get_importer, search or ())
    specs = [spec for finder in finders if finder and (spec := finder.find_spec(name, None))]
    spec = next((spec for spec in specs if spec.loader is not None), None)
    if spec is None and specs:  # a folder without __init__.py may have parts in several places
        spec = specs[0]
        parts = [part.submodule_search_locations or () for part in specs]
        spec.submodule_search_locations = list(chain.from_iterable(parts))
    return spec


def where_it_stands(name: str) -> str:
    """Advice on a module that is not found although the working directory has it; else empty.

    The services do not import from there: anyone who can write a file there could run code in them.
    """
    here, first = Path.cwd(), name.partition(".")[0]
    if not first or not ((here / first).is_dir() or (here / f"{first}.py").is_file()):
        return ""
    return f"; {first!r} is in the working directory, which is not searched: set PYTHONPATH={here}"


def check_admitted(package: str, name: str, admitted: Collection[str], key: str) -> None:
    """Refuse a dotted path that came from elsewhere unless the loader's own recipe names it; `load` checks others.

    `load` runs the module's code; a caller of a service may not choose that code.

    Raises:
        ConfigError: a dotted path that the recipe does not name; says at which `key` it may.
    """
    if "." in name and name not in admitted:
        kind = package.rpartition(".")[2]
        raise ConfigError(
            f"{name[:200]!r} is none of the {kind} known here ({', '.join(known(package))}); one of your own is"
            f" loaded only if the recipe of the service that loads it names it: {key}"
        )


def constant(package: str, name: str, attribute: str, default: Any) -> Any:
    """A literal that the module of `load` assigns at its top level, read without importing it.

    So a recipe can be checked where the module's own imports (torch) are not installed.
    """
    for statement in _statements(package, name):
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=found)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=found), value=ast.expr() as value)
            ) if found == attribute:
                return ast.literal_eval(value)
    return default


def config_class(package: str, name: str, called: str = "Config") -> Any | None:
    """The class of options of a module of `package`; None where there is none, or only an import could tell.

    A module that needs torch imports its class from one that does not, and is not imported itself; of modules named
    by a dotted path, which are someone's own code, only those with a class `Options` are.
    """
    place = class_place(package, name, called)
    if place is None or (place[0] == name and called == "Config"):
        return None
    return _attribute(place[0], name, place[1])


def class_place(package: str, name: str, called: str) -> tuple[str, str] | None:
    """The module that defines the class of options of a module, and its name there; neither is imported."""
    full = name if "." in name else modules(package).get(name, name)
    for statement in _statements(package, name):
        if isinstance(statement, ast.ClassDef) and statement.name == called:
            return full, called
        if not isinstance(statement, ast.ImportFrom):
            continue
        for alias in statement.names:
            if (alias.asname or alias.name) == called and alias.name != "Config":
                relative = "." * statement.level + (statement.module or "")
                return importlib.util.resolve_name(relative, full.rpartition(".")[0]), alias.name
    return None


def _statements(package: str, name: str) -> list[ast.stmt]:
    """The top level of the module of `load`, not imported; empty where there is no source."""
    spec = find(name if "." in name else modules(package).get(name, f"{package}.{name}"))
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return []
    source = Path(spec.origin)
    return _parsed(source, source.stat().st_mtime_ns)


@functools.cache
def _parsed(source: Path, changed_ns: int) -> list[ast.stmt]:
    """The statements of a file; a recipe's carriers are asked for several literals each."""
    text = source.read_text(encoding="utf-8-sig")
    try:
        return ast.parse(text).body
    except SystemError:  # Python 3.11 while another thread parses, too (python/cpython#106905)
        return ast.parse(text).body
