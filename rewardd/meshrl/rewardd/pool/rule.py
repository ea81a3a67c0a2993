"""A rule: everything that decides a score (sources, arguments, weights). Its hash is its version.

Files are read once: the scoring processes run what was hashed, even when a file on disk is edited later.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.metadata
import inspect
import json
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from meshrl.common.plugins import find, known, where_it_stands
from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.types import Json
from meshrl.rewardd.config import RewardConfig, RewardFunctionConfig
from meshrl.rewardd.pool.signatures import ARGUMENTS, FunctionKind, takes_columns

REWARDS = "meshrl.rewardd.rewards"
SIGNATURE = "(data_source, solution_str, ground_truth, extra_info=None, **reward_kwargs)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """One function of a rule, complete: a process that gets it needs no file except what the function imports."""

    component: str
    weight: float
    kwargs: dict[str, Json]
    name: str
    """The function."""
    module: str = ""
    """Import it from here (from the wheel at `path`, if one is given), or …"""
    path: str = ""
    """… compile `source`, whose traceback lines name this file."""
    source: str = ""
    kind: FunctionKind = FunctionKind.COMPUTE_SCORE
    """How it is called."""
    gate: float | None = None
    """Below this score the reward is this function's alone."""
    digest: str
    """Hash of the source; for a built-in also of its helpers and the package versions that it declares."""

    @property
    def is_built_in(self) -> bool:
        """Whether it comes with meshrl."""
        return self.module.startswith(f"{REWARDS}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRule:
    """The weighted sum of `functions`."""

    functions: tuple[FunctionSpec, ...]
    judges: tuple[Json, ...] = ()
    """The judges beside them, as the recipe describes them; the remote programs themselves are not covered."""

    @property
    def reward_hash(self) -> str:
        """32 hex digits of SHA-256 over sources, names, arguments and weights; not over the path of a file."""
        content: list[Json] = [
            [f.component, f.weight, f.gate, f.kind, f.name, f.module, f.digest, f.kwargs]
            for f in self.functions
        ]
        return _digest(json.dumps([*content, *self.judges], sort_keys=True, default=str))

    def to_json(self) -> Json:
        """The functions as JSON, for the scoring process."""
        return [asdict(function) for function in self.functions]

    @classmethod
    def from_json(cls, value: Json) -> RewardRule:
        """The inverse of `to_json`."""
        specs = ({**function, "kind": FunctionKind(function["kind"])} for function in value)
        return cls(functions=tuple(FunctionSpec(**spec) for spec in specs))


def read_rule(config: RewardConfig) -> RewardRule:
    """Read and check what a recipe names, without running any of it.

    Raises:
        ConfigError: an unknown name, a file that is missing, does not parse or does not define the function,
            arguments that are not JSON.
    """
    return RewardRule(
        functions=tuple(_read(function) for function in config.scorers),
        judges=tuple(judge.model_dump(mode="json") for judge in config.judges),
    )


def _read(function: RewardFunctionConfig) -> FunctionSpec:
    try:
        kwargs = json.loads(json.dumps(function.kwargs))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"kwargs of reward {function.component!r}: {error}") from error
    if function.path is not None:
        path = function.path.expanduser().absolute()
        source = _read_source(path)
        wanted = f"{function.name}{SIGNATURE}"
        find_function(source, function.name, wanted, f"reward file {path}", ConfigError)
        return FunctionSpec(
            component=function.component,
            weight=function.weight,
            gate=function.gate,
            kwargs=kwargs,
            name=function.name,
            path=str(path),
            source=source,
            digest=_digest(source),
        )
    module = function.name if "." in function.name else f"{REWARDS}.{function.name}"
    return FunctionSpec(
        component=function.component,
        weight=function.weight,
        gate=function.gate,
        kwargs=kwargs,
        name="compute_score",
        module=module,
        digest=_digest("".join(_module_sources(_find(function.name), set()))),
    )


def _read_source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        near = difflib.get_close_matches(path.name, _siblings(path), n=1)
        hint = f"; did you mean {path.with_name(near[0])}?" if near else ""
        raise ConfigError(f"no reward file {path}{hint}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reward file {path} cannot be read: {error}") from error


def _siblings(path: Path) -> list[str]:
    return [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []


def find_function(
    source: str, name: str, wanted: str, where: str, error: type[UserError] = UserError
) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The definition of function `name` in `source`, which is not run; None if an import or assignment binds `name`.

    Raises:
        UserError: `source` is not Python (with `line`), or nothing in it binds `name`; as class `error`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an odd escape in a string of the user's is harmless
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as fault:
        line = getattr(fault, "lineno", None) or 1
        reason = getattr(fault, "msg", None) or str(fault) or "nested too deeply"
        raise error(f"{where}, line {line}: {reason}", line=line) from fault
    functions = {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    if name in functions:
        return functions[name]
    bound = {
        getattr(node, kind, None) for node in ast.walk(tree) for kind in ("name", "asname", "id")
    }
    if name in bound or "*" in bound:
        return None  # the scoring process checks it
    near = difflib.get_close_matches(name, functions, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    has = f"it defines {', '.join(functions)}" if functions else "it defines no function"
    raise error(f"{where} defines no {name!r}{hint} ({has}; wanted: {wanted})")


def check_call(
    node: ast.FunctionDef | ast.AsyncFunctionDef,
    kind: FunctionKind,
    kwargs: Iterable[str],
    where: str,
) -> None:
    """Check, without running the file, that a function takes the arguments it is called with.

    Raises:
        ConfigError: it does not. Nothing is said of a decorated function, whose decorator may change them.
    """
    if node.decorator_list:
        return
    given, empty = node.args, inspect.Parameter.empty
    positional = [*given.posonlyargs, *given.args]
    with_default = positional[len(positional) - len(given.defaults) :]
    parameters = [
        inspect.Parameter(
            each.arg,
            inspect.Parameter.POSITIONAL_ONLY
            if each in given.posonlyargs
            else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None if each in with_default else empty,
        )
        for each in positional
    ]
    if given.vararg:
        parameters.append(inspect.Parameter(given.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    parameters += [
        inspect.Parameter(
            each.arg,
            inspect.Parameter.KEYWORD_ONLY,
            default=empty if default is None else None,
        )
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg:
        parameters.append(inspect.Parameter(given.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    signature = inspect.Signature(parameters)
    if kind is FunctionKind.COMPUTE_SCORE and takes_columns(signature.parameters):
        kind = FunctionKind.BATCH
    arguments = [*ARGUMENTS[kind], *kwargs]
    try:
        signature.bind(**dict.fromkeys(arguments))
    except TypeError as error:
        raise ConfigError(
            f"{where}:{node.lineno}: {node.name}({ast.unparse(given)}) cannot be called: {error}"
            f" (it is called with {', '.join(arguments)})"
        ) from error


def _find(name: str) -> str:
    """The source file of a built-in or of a dotted module, without running it."""
    if "." not in name:
        names = known(REWARDS)
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"no reward named {name!r}{hint} (known: {', '.join(names)}, a dotted module, or give a `path`)"
            )
        name = f"{REWARDS}.{name}"
    spec = find(name)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        hint = where_it_stands(name)
        raise ConfigError(f"no reward module {name!r}: nothing to import under that name{hint}")
    return spec.origin


def _module_sources(origin: str, seen: set[str]) -> Iterator[str]:
    """A module's source, those of the reward modules it imports, and the versions of the packages it declares."""
    seen.add(origin)
    source = Path(origin).read_text(encoding="utf-8-sig")
    yield source
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(REWARDS):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in [node.module or "", *names] if node.module != REWARDS else names:
                spec = find(name) if _is_module(name) else None
                if spec and spec.origin and spec.origin not in seen:
                    yield from _module_sources(spec.origin, seen)
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["REQUIRES"]:
            for package in ast.literal_eval(node.value):
                yield f"{package}=={_version(package)}"


def _is_module(name: str) -> bool:
    """True for a module of the rewards package; `find_spec` on the name of a function would raise."""
    return name.startswith(f"{REWARDS}.") and name.count(".") == REWARDS.count(".") + 1


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
