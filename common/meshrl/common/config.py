"""The base of every configuration class (frozen, strict, documented field by field), and the options of plug-ins."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from meshrl.contract.errors import ConfigError


class Config(BaseModel):
    """Unknown keys are refused.

    A docstring under a field is its documentation (`config explain`). Reading docstrings (from the source), and
    building the validator of a section that is never validated alone, take long: both wait until they are needed.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", defer_build=True, validate_default=True, allow_inf_nan=False
    )


C = TypeVar("C", bound=Config)


def documentation(kind: type[BaseModel], name: str) -> str:
    """The docstring under a field of a Config class or of a base of it, on one line; empty if there is none."""
    for each in kind.__mro__:
        if found := _docstrings(each.__module__).get(each.__qualname__, {}).get(name):
            return " ".join(found.split())
    return ""


@functools.cache
def _docstrings(module: str) -> Mapping[str, Mapping[str, str]]:
    """Field docstrings of a module's classes, by qualified name and field."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}  # built in, or typed into an interpreter
    found: dict[str, dict[str, str]] = {}
    inner: list[tuple[str, ast.AST]] = [("", tree)]
    while inner:
        within, node = inner.pop()
        if isinstance(node, ast.ClassDef):
            found[within + node.name] = {
                field.target.id: text.value.value
                for field, text in itertools.pairwise(node.body)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                if isinstance(text.value.value, str)
            }
            within += f"{node.name}."
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            within += f"{node.name}.<locals>."
        inner += [(within, child) for child in ast.iter_child_nodes(node)]
    return found


class Machine(Protocol):
    """Facts about the machine of a run that the check of a recipe needs.

    Options of a plug-in that depend on it have a method `faults(machine, model)`, which yields pairs of an option
    (empty: the plug-in as a whole) and a sentence. It may look, and never load or start anything.
    """

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        ...

    @property
    def no_gpu(self) -> str:
        """The reason why services can use no GPU, as a noun phrase."""
        ...

    def installed(self, package: str) -> bool:
        """Whether a package of this name can be imported."""
        ...

    def exists(self, path: Path) -> bool:
        """Whether there is a file or directory."""
        ...

    def is_file(self, path: Path) -> bool:
        """Whether there is a file."""
        ...

    def names(self, directory: Path) -> list[str]:
        """Names in a directory; empty where there is none."""
        ...

    def text(self, path: Path) -> str:
        """The text of a file. Raises UserError."""
        ...

    def tensors(self, model: Path) -> Mapping[str, tuple[int, ...]] | None:
        """Shapes of the tensors of a checkpoint by their full names; None where they cannot be told."""
        ...

    def shapes(self, file: Path) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors of a file of weights. Raises UserError where it is none, or not all of one."""
        ...

    def known(self, path: Path) -> bool:
        """Whether the content of a file or directory is known: it may be elsewhere."""
        ...

    def rows(self, path: Path, reader: str | None) -> Iterator[Any]:
        """The rows of a data file. Raises UserError."""
        ...

    def tokenizer(self, directory: Path) -> Any:
        """The tokenizer in a directory; None where it cannot be told. Raises UserError for one that is broken."""
        ...

    def check_gym(self, gym: Any) -> None:
        """Try the names and options of reasoning-gym's tasks. Raises ConfigError."""
        ...

    def program(self, name: str) -> bool:
        """Whether `name`, a path or a word on PATH, can be run."""
        ...

    def tried(self, command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> str:
        """The last line of a program that refuses its work; empty where it does it, or is elsewhere."""
        ...

    def json(self, path: Path) -> Mapping[str, Any]:
        """The object in a file; empty where there is none."""
        ...

    @property
    def no_sandbox(self) -> str:
        """Why code cannot be isolated strictly; empty where it can."""
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


Seed = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A field that seeds draws of numpy, torch and engines, which take no other numbers."""


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return pattern


RegularExpression = Annotated[str, AfterValidator(_compiles)]
"""A field with a pattern in Python's syntax, refused where it does not compile."""


def _as_words(values: object) -> object:
    """Numbers as they are written: YAML reads `NCCL_DEBUG_SUBSYS: 1` as one."""
    if not isinstance(values, Mapping):
        return values
    numbers = {key: str(value) for key, value in values.items() if type(value) in (int, float)}
    return {**values, **numbers}


def _check_variables(values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{name!r:.60}: a variable has a name without = and no zero byte")
    return values


Environment = Annotated[
    dict[str, str], BeforeValidator(_as_words), AfterValidator(_check_variables)
]
"""Variables of a process; a number stands for its digits."""
