"""From a YAML file and `a.b=c` overrides to a Recipe; every mistake is named with file, line and key."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import ValidationError

from meshrl.common.bounded_yaml import BoundedLoader
from meshrl.common.checks import Loc
from meshrl.common.config import Config
from meshrl.common.files import replace_file
from meshrl.common.plain_text import counted, say
from meshrl.config.checks import cross_checks, warnings
from meshrl.config.device_defaults import with_device_defaults
from meshrl.config.dropped_keys import DROPPED_KEYS, REPLACED_VALUES
from meshrl.config.explain import booleans_as_numbers, in_order, origin_of, problems
from meshrl.config.hub import with_local_paths
from meshrl.config.machine import ThisMachine
from meshrl.config.recipe import Recipe
from meshrl.config.stages import TINKER, service_kind
from meshrl.contract.errors import ConfigError
from meshrl.trainer.algorithms import recipe_defaults
from meshrl.transferqueue.several_processes import refusal

C = TypeVar("C", bound=Config)
SHARDS: Final[Loc] = ("queue", "shards")
"""A key that is dropped where it says 1. A run that was on more queue processes is refused."""


class _Loader(BoundedLoader):
    """YAML 1.2's scalars: PyYAML's 1.1 reads `1e-6` as text, `0.5_5` as 0.55, `no` as false, `1:30` as 90."""


class _Dumper(yaml.SafeDumper):
    """Quotes a text that YAML 1.1 or 1.2 would read as something else, and keeps each on one line."""

    def text(self, text: str) -> yaml.ScalarNode:
        """Any text."""
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def write_double_quoted(self, text: str, split: bool = True) -> None:
        """Escape all that is not ASCII: it may turn the direction of the line."""
        self.allow_unicode = False
        super().write_double_quoted(text, split)
        self.allow_unicode = True


_Dumper.add_representer(str, _Dumper.text)
# PyYAML's own reads 010 as 8, and 08 not at all.
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first)
        )


MOST_OVERRIDES = 2000


def load_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    check: bool = True,
    sections: Callable[[Recipe], Collection[str]] | Collection[str] | None = None,
    machine: ThisMachine | None = None,
    hub: bool = True,
) -> Recipe:
    """The recipe in `path` with `overrides` applied, the last of several winning.

    A key that an earlier version knew is dropped, with a line on stderr (see DROPPED_KEYS); so is said, when all is
    checked, what would start and hardly be meant.

    Args:
        path: A YAML file.
        overrides: `a.b=c` with `c` in YAML; `+a.b=c` and `++a.b=c` say the same.
        check: Also check what no single key can tell: contents of files, names, options, packages, sizes that must
            fit together.
        sections: Check these sections only: the machine of the queue need not have the model. What they are may
            depend on the recipe.
        machine: The one that will run it; None is this one.
        hub: Have what it names of the Hugging Face hub here; see `meshrl.config.hub`.

    Raises:
        ConfigError: one line per problem.
        UserError: a queue of several processes is asked for.
    """
    written = Written.read(path, overrides)
    for line in _drop_retired(written.tree, written.origins):
        say(line, err=True)
    run = written.tree.setdefault("run", {})
    if isinstance(run, dict) and not run.get("name"):
        run["name"] = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-") or "run"
    machine = machine or ThisMachine()
    written = written.with_algorithm().with_correction()
    recipe = with_device_defaults(written.as_config(Recipe), machine)
    checked = sections(recipe) if callable(sections) else sections
    if checked is None and recipe.tinker is not None:
        checked = service_kind(recipe, TINKER).sections
    local = with_local_paths(written.tree, written.origins, machine, checked) if hub else {}
    if local and local != written.tree:
        written = Written(local, written.origins)
        recipe = with_device_defaults(written.as_config(Recipe), machine)
    if check:
        broken = [
            f"{origin_of(written.origins, at)}: {sentence}"
            for at, sentence in cross_checks(recipe, machine, checked)
        ]
        if broken:
            raise ConfigError("\n".join(broken))
        for at, sentence in warnings(recipe, machine) if checked is None else ():
            say(f"warning: {origin_of(written.origins, at)}: {sentence}", err=True)
    return recipe


@dataclass(frozen=True, slots=True)
class Written:
    """A recipe as it was written: its tree, and the place of each key."""

    tree: dict[str, Any]
    origins: dict[Loc, str]
    """Key to `file:line`, or to the override that set it."""

    @classmethod
    def read(cls, path: Path, overrides: Sequence[str]) -> Written:
        """A YAML file with overrides applied. Raises ConfigError, one line per problem."""
        tree, origins = read_yaml(path)
        found: list[str] = []
        if len(overrides) > MOST_OVERRIDES:
            raise ConfigError(
                f"{len(overrides)} overrides, of {MOST_OVERRIDES} at most: write them into {path}"
            )
        for text in overrides:
            try:
                _override(tree, origins, text)
            except ConfigError as error:
                found.append(str(error))
        if found:
            raise ConfigError("\n".join(found))
        return cls(tree, origins)

    def with_algorithm(self) -> Written:
        """The same with what `algorithm.name` sets where nothing else is written. Raises ConfigError."""
        name = recipe_defaults.name_of(self.tree)
        if name is None:
            return self
        at: Loc = ("algorithm", "name")
        try:
            under = recipe_defaults.defaults(name)
        except ConfigError as error:
            raise ConfigError(f"{origin_of(self.origins, at)}: algorithm.name: {error}") from error
        return self._over(under, f"algorithm.name: {name}")

    def with_correction(self) -> Written:
        """The same with what engines with weights of few bits need, where nothing else is written."""
        return self._over(recipe_defaults.correction(self.tree), "rollout.engine.quantization")

    def _over(self, under: Mapping[str, Any], origin: str) -> Written:
        added: dict[Loc, str] = {
            place: origin for place in recipe_defaults.places(under) if place not in self.origins
        }
        return Written(recipe_defaults.merged(self.tree, under), {**added, **self.origins})

    def with_local_paths(self) -> Written:
        """The same with local paths of what is on the Hugging Face hub, downloaded. Raises ConfigError."""
        return Written(with_local_paths(self.tree, self.origins, ThisMachine()), self.origins)

    def as_config(self, kind: type[C]) -> C:
        """The configuration that was written. Raises ConfigError, one line per problem."""
        wrong = {
            at: f"{origin_of(self.origins, at)}: {sentence}"
            for at, sentence in booleans_as_numbers(kind, self.tree)
        }
        try:
            config = kind.model_validate(self.tree)
        except ValidationError as error:
            wrong |= problems(kind, error, self.origins)
        if wrong:
            raise ConfigError("\n".join(in_order(wrong, self.origins)))
        return config


def in_yaml(value: Any) -> str:
    """A value in one line of YAML, as an override, a list or a mapping has it."""
    return _dumped([value], flow=True)[1:-2]


def recipe_yaml(tree: Any) -> str:
    """A recipe's sections as YAML."""
    return _dumped(tree, flow=False)


def _dumped(value: Any, *, flow: bool) -> str:
    text: str = yaml.dump(
        value,
        Dumper=_Dumper,
        allow_unicode=True,
        default_flow_style=flow,
        sort_keys=False,
        width=sys.maxsize,
    )
    return text


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write `recipe` with every default filled in: what a run really ran with. A reader sees all of it or none."""
    replace_file(path, recipe_yaml(recipe.model_dump(mode="json")))


def anchored(recipe: Recipe) -> Recipe:
    """The same recipe with absolute paths, its run's directory among them: it means the same from everywhere."""

    def absolute(path: Path) -> Path:
        return path if path.parts[:1] == ("~",) else path.absolute()

    run = recipe.run.model_copy(update={"dir": recipe.run.path})
    return _with_paths(recipe.model_copy(update={"run": run}), absolute)


def load_run(path: Path) -> Recipe:
    """The recipe of the run in whose directory `path` lies, wherever that was when it ran.

    Paths under the directory of then are paths under the directory of now. A recipe of an earlier version has paths
    relative to where `up` was called; those that are not there are looked for beside `runs/`.

    Raises:
        ConfigError: no such file, or no recipe.
    """
    return moved(load_recipe(path, check=False), path.parent)


def recorded(tree: Mapping[str, Any], directory: Path) -> Recipe:
    """The recipe that a run in `directory` recorded as JSON, with paths as `load_run` has them.

    Keys that are gone are dropped.

    Raises:
        ConfigError: it is no recipe.
        UserError: its queue was several processes.
    """
    kept = copy.deepcopy(dict(tree))
    _drop_retired(kept, {SHARDS: str(directory)})
    try:
        recipe = Recipe.model_validate(kept)
    except ValidationError as error:
        for each in error.errors():
            if each["type"] == "extra_forbidden":
                *path, last = each["loc"]
                _section(kept, path).pop(last, None)
        recipe = Written(kept, {(): str(directory)}).as_config(Recipe)
    return moved(recipe, directory)


def moved(recipe: Recipe, here: Path) -> Recipe:
    """The recipe of a run whose directory is `here` now."""
    before = recipe.run.path

    def change(each: Path) -> Path:
        if each.is_relative_to(before):
            return here / each.relative_to(before)
        beside = here.absolute().parent.parent / each
        return beside if not each.exists() and beside.exists() else each

    run = recipe.run.model_copy(update={"dir": before})
    return _with_paths(recipe.model_copy(update={"run": run}), change)


def _with_paths(recipe: Recipe, change: Callable[[Path], Path]) -> Recipe:
    """The recipe with every path changed."""

    def walk(value: Any) -> Any:
        if isinstance(value, Path):
            return change(value)
        if isinstance(value, dict):
            return {key: walk(inner) for key, inner in value.items()}
        return [walk(inner) for inner in value] if isinstance(value, list | tuple) else value

    return Recipe.model_validate(walk(recipe.model_dump()))


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[Loc, str]]:
    """The sections of a YAML file, and the `file:line` of each key. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        near = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        hint = f" (there are: {', '.join(near)})" if near else ""
        raise ConfigError(f"{path}: no such recipe{hint}") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            origins: dict[Loc, str] = {(): str(path)}
            if node is not None:
                duplicates = [f"{path}:{line}: {key} is given twice" for key, line in _twice(node)]
                if duplicates:
                    raise ConfigError("\n".join(duplicates))
                origins |= {at: f"{path}:{line}" for at, line in _lines(node)}
            tree = loader.construct_document(node) if node is not None else {}
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where}: not valid YAML: {reason}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: want sections (run, model, data, ...), got {tree!r:.60}")
    return tree, origins


def _lines(node: yaml.Node, at: Loc = ()) -> Iterator[tuple[Loc, int]]:
    """Every key and list item with the line it starts on."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            where = (*at, str(key.value))
            yield where, key.start_mark.line + 1
            yield from _lines(value, where)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*at, index), value.start_mark.line + 1
            yield from _lines(value, (*at, index))


def _twice(node: yaml.Node, at: Loc = ()) -> Iterator[tuple[str, int]]:
    """Keys that occur twice in one section: YAML would silently keep the last."""
    if isinstance(node, yaml.MappingNode):
        seen: set[Hashable] = set()
        for key, value in node.value:
            where = (*at, str(key.value))
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen and key.value != "<<":
                    yield ".".join(map(str, where)), key.start_mark.line + 1
                seen.add(key.value)
            yield from _twice(value, where)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _twice(value, (*at, index))


def _override(tree: dict[str, Any], origins: dict[Loc, str], text: str) -> None:
    """Set one key in `tree`; a number in the key counts items of a list."""
    key, equals, raw = text.partition("=")
    words = key.lstrip("+").split(".")
    origin = f"command line: {text}"
    if not equals or not all(words):
        raise ConfigError(f"{origin}: want key=value, as in rollout.n=8")
    try:
        value = yaml.load(raw, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: the value is not valid YAML") from error
    at: Loc = ()
    here: Any = tree
    for depth, word in enumerate(words):
        last = depth == len(words) - 1
        part: str | int = word
        if isinstance(here, list):
            if not word.isdigit() or int(word) >= len(here):
                raise ConfigError(
                    f"{origin}: {'.'.join(words[:depth])} has items 0 to {len(here) - 1}, not {word!r}"
                )
            part = int(word)
        at = (*at, part)
        if last:
            here[part] = value
            origins |= {at: origin}
            for stale in [a for a in origins if a[: len(at)] == at and a != at]:
                del origins[stale]
        else:
            inner = here[int(part)] if isinstance(here, list) else here.get(part)
            if not isinstance(inner, dict | list):
                # A section that is absent, null, or (wrongly) a value: the override makes it one.
                inner = here[part] = {}
            here = inner


def _drop_retired(tree: dict[str, Any], origins: dict[Loc, str]) -> list[str]:
    """Remove retired keys and replace retired values in `tree`.

    Returns:
        A line for the user for each that meant something else than what holds now, and one for all others.

    Raises:
        UserError: a queue of several processes.
    """
    lines = []
    unchanged = []
    for (*path, last), dropped in DROPPED_KEYS.items():
        section = _section(tree, path)
        if last in section:
            value = section.pop(last)
            name = ".".join(map(str, (*path, last)))
            origin = origins.pop((*path, last), name)
            if (*path, last) == SHARDS and value not in (1, "1", None):
                raise refusal(f"{origin}: {name} is {value}")
            if dropped.changes(value):
                lines.append(
                    f"{origin}: {name} is no longer a key and is ignored: {dropped.instead}"
                )
            else:
                unchanged.append(f"{origin}: {name}")
    for (*path, last), replacements in REPLACED_VALUES.items():
        section = _section(tree, path)
        value = section.get(last)
        if isinstance(value, str) and value in replacements:
            section[last] = replacements[value]
            name = ".".join(map(str, (*path, last)))
            origin = origins.get((*path, last), name)
            lines.append(f"{origin}: {name}={value} is no longer a value: {section[last]} is used")
    if len(unchanged) == 1:
        lines.append(f"{unchanged[0]} is no longer a key; this changes nothing")
    elif unchanged:
        others = counted(len(unchanged) - 1, "other")
        lines.append(f"{unchanged[0]} and {others} are no longer keys; this changes nothing")
    return lines


def _section(tree: Any, path: list[str | int]) -> dict[Any, Any]:
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}
