"""Checks that several sections of a recipe share: options and packages of plug-ins, files and directories.

A problem is the key to change and one sentence. No check imports torch, runs a user's file or starts anything.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from meshrl.common import plugins
from meshrl.common.config import Machine, read_options
from meshrl.contract.errors import ConfigError

Loc: TypeAlias = tuple[str | int, ...]
"""A key of a recipe, part by part; a number is a place in a list."""
Problem: TypeAlias = tuple[Loc, str]


def dotted(at: Loc) -> str:
    """The key with dots, as in a recipe's override."""
    return ".".join(map(str, at))


def check_options(
    at: Loc,
    package: str,
    name: str,
    given: Mapping[str, Any],
    machine: Machine,
    model: Path,
    *,
    named: str = "name",
) -> Iterator[Problem]:
    """Options against the module's `Config`, and what they ask of the machine; `named` is the key of the name."""
    kind, key = plugins.config_class(package, name), dotted(at)
    if kind is None:
        return
    try:
        options = read_options(kind, given, where=key)
    except ConfigError as error:
        below = error.details["key"].removeprefix(key).strip(".")
        yield (*at, *(below.split(".") if below else ())), str(error)
        return
    faults = getattr(options, "faults", None)
    for option, text in faults(machine, model) if faults else ():
        where = (*at, option) if option else (*at[:-1], named)
        yield where, f"{dotted(where)}: {text}"


def check_required(at: Loc, package: str, name: str, machine: Machine) -> Iterator[Problem]:
    """The packages that a module lists as `REQUIRES`."""
    for required in plugins.constant(package, name, "REQUIRES", ()):
        if not machine.installed(required):
            yield (
                at,
                f"{dotted(at)}: {name} needs the package {required}, which is not installed",
            )


def check_directory(at: Loc, path: Path, what: str, machine: Machine) -> Iterator[Problem]:
    """Says that there is no such directory."""
    if not machine.exists(path):
        near = _near(path, machine)
        yield at, f"{dotted(at)}: no such directory: {path}{near}; want the directory of {what}"
    elif machine.is_file(path):
        yield at, f"{dotted(at)}: {path} is a file; want the directory of {what}"


def missing_file(at: Loc, path: Path, machine: Machine) -> Iterator[Problem]:
    """Says that there is no such file, and which one may be meant."""
    if not machine.exists(path):
        yield at, f"{dotted(at)}: no such file: {path}{_near(path, machine)}"
    elif not machine.is_file(path):
        yield at, f"{dotted(at)}: {path} is a directory; want a file"


def _near(path: Path, machine: Machine) -> str:
    """The entry beside a missing path that looks most like it."""
    close = difflib.get_close_matches(path.name, machine.names(path.parent), n=1)
    return f" (did you mean {path.parent / close[0]}?)" if close else ""
