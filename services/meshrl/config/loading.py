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

from meshrl.config.checks import cross_checks, warnings
from meshrl.config.device_defaults import with_device_defaults
from meshrl.config.explain import Loc
from meshrl.config.hub import with_local_paths
from meshrl.config.machine import ThisMachine
from meshrl.config.problems import booleans_as_numbers, in_order, origin_of, problems
from meshrl.config.recipe import Recipe
from meshrl.contract.config import Config
from meshrl.contract.errors import ConfigError
from meshrl.contract.files import replace_file
from meshrl.contract.plain_text import say
from meshrl.trainer.algorithms import recipe_defaults
from meshrl.transferqueue.several_processes import refusal

C = TypeVar("C", bound=Config)
DROPPED_KEYS: Final[Mapping[Loc, str]] = {
    ("queue", "compression_dictionary"): "payload is compressed without a dictionary",
    ("data", "media_store"): "pictures travel with their prompt or row, of 32 MiB at most",
    ("data", "media_inline_bytes"): "pictures of one prompt, or one row, have 32 MiB at most",
    ("queue", "local_socket"): "payload always travels over gRPC",
    ("queue", "shared_bytes"): "payload always travels over gRPC",
    ("queue", "shared_memory_bytes"): "payload always travels over gRPC",
    ("queue", "shards"): "a queue is one process",
    ("queue", "grow_bytes"): "the disk store grows by itself",
    ("queue", "quota"): "1,000 runs, each of 4,000,000 rows and 1 TiB that wait",
    ("queue", "memory_bytes"): "the memory store keeps all payload in RAM",
    ("queue", "cache_bytes"): "512 MiB of frames that were just written are kept in RAM",
    ("queue", "resident_tokens"): "set queue.resident_bytes",
    ("reward", "start_deadline_s"): "60 s",
    ("reward", "memory_limit_bytes"): "set reward.limits.memory_bytes",
    ("reward", "cpu_limit_s"): "set reward.deadline_s",
    ("reward", "limits", "cpu_s"): "set reward.deadline_s; a submission may ask for cpu_s",
    ("reward", "slots"): "256 rows at once",
    ("reward", "rows_per_call"): "16 rows a call",
    ("reward", "limits", "start_deadline_s"): "30 s",
    ("reward", "limits", "open_files"): "64 files",
    ("reward", "limits", "tmp_bytes"): "64 MiB",
    ("reward", "limits", "output_bytes"): "8 MiB",
    ("reward", "batch_size"): "64 samples",
    ("reward", "registry", "max_versions"): "1,000 versions",
    ("reward", "registry", "requests_per_minute"): "1,200 requests a minute",
    ("reward", "registry", "max_request_bytes"): "32 MiB",
    ("reward", "registry", "max_source_bytes"): "1 MiB",
    ("reward", "registry", "max_wheel_bytes"): "16 MiB",
    ("reward", "registry", "max_unpacked_bytes"): "64 MiB",
    ("reward", "registry", "max_tests"): "256 tests",
    ("reward", "registry", "submissions_per_minute"): "60 submissions a minute",
    ("reward", "registry", "keep_samples"): "4096 samples",
    (
        "rollout",
        "breaker",
    ): "half of 20 requests, and pauses of 0.5 to 30 s",
    ("rollout", "journal_ms"): "tokens of running responses are saved after at most 1 s",
    ("rollout", "gateway", "max_connections"): "4096 connections",
    ("rollout", "gateway", "claims_per_minute"): "6000 requests a minute",
    ("run", "log_max_bytes"): "16 MiB a file",
    ("run", "log_keep"): "4 older files",
    ("placement", "turn_wait_s"): "900 s",
    ("trainer", "metrics_max_bytes"): "64 MiB",
    ("trainer", "take_wait_s"): "30 s",
    ("trainer", "profile_steps"): "the third step after each start",
    ("trainer", "parallel", "sequence"): "set model.ulysses_sequence_parallel_size",
    ("trainer", "parallel", "data_shard"): "as many ranks as the others leave",
    ("reference", "deterministic"): "exactly where queue.max_staleness is 0",
    ("actor", "conventions"): "set algorithm.conventions",
    ("algorithm", "distillation", "discount"): "each token answers for itself",
    ("algorithm", "vapo", "lam_critic"): "the critic learns returns with a lambda of 1",
    ("data", "reasoning_gym", "curriculum", "lower_at"): "a level never falls",
    ("weights", "adapters_only"): "adapters of a policy with LoRA travel alone",
    ("actor", "policy_loss", "rollout_correction"): "set algorithm.rollout_correction",
    ("policy_loss", "rollout_correction"): "meshrl dpo has no rollouts to correct",
    ("weights", "among"): "weights.carrier auto takes shm, nccl, disk or gloo by a rule",
    ("weights", "ready_s"): "it is three times weights.base_s",
    ("weights", "commit_s"): "it is six times weights.base_s, and more for large versions",
    ("weights", "beat_s"): "it follows from weights.silence_s and weights.base_s",
    (
        "weights",
        "quorum",
    ): "a version waits for all replicas, and after a while for weights.late_quorum of them",
    ("weights", "late_s"): "stragglers have at least a second",
    ("weights", "resends"): "what arrives corrupted is sent again twice",
    ("weights", "max_density"): "a bucket of which more than 15 % has changed goes whole",
    ("weights", "bases"): "the trainer keeps two older versions for weights.carrier delta",
    ("weights", "nccl", "device"): "set weights.nccl.env: {CUDA_VISIBLE_DEVICES: ...}",
    ("weights", "nccl", "spare"): "one process is kept in reserve",
    ("weights", "ipc", "device"): "the first CUDA device that the trainer sees",
    ("weights", "nccl", "start_s"): "a process of NCCL has 60 s to find its GPU",
}
"""Keys of earlier versions that are ignored, so that old runs stay readable, and what holds instead."""
SHARDS: Final[Loc] = ("queue", "shards")
"""A key that is dropped where it says 1. A run that was on more queue processes is refused."""
REPLACED_VALUES: Final[Mapping[Loc, Mapping[object, object]]] = {
    ("queue", "durability"): {"everysec": "always"},
    ("weights", "carrier"): {"object": "disk"},
}
"""Values of earlier versions, and what replaces them."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: PyYAML's 1.1 reads `1e-6` as text, `0.5_5` as 0.55, `no` as false, `1:30` as 90."""


class _Dumper(yaml.SafeDumper):
    """Quotes a text that YAML 1.1 or 1.2 would read as something else, and keeps each on one line."""

    def text(self, text: str) -> yaml.ScalarNode:
        """Any text."""
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def write_double_quoted(self, text: str, split: bool = True) -> None:
        """With an escape for all that is not ASCII: it may turn the direction of the line."""
        self.allow_unicode = False
        super().write_double_quoted(text, split)
        self.allow_unicode = True


_Dumper.add_representer(str, _Dumper.text)
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
        check: Also check what no single key can tell: what stands in files, names, options, packages, sizes that must
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
    local = with_local_paths(written.tree, written.origins, machine, checked) if hub else {}
    if local and local != written.tree:
        written = Written(local, written.origins)
        recipe = with_device_defaults(written.as_config(Recipe), machine)
    if check:
        broken = [
            f"{origin_of(written.origins, at)}: {sentence}"
            for at, sentence in cross_checks(recipe, machine)
            if checked is None or at[0] in checked
        ]
        if broken:
            raise ConfigError("\n".join(broken))
        for at, sentence in warnings(recipe, machine) if checked is None else ():
            say(f"warning: {origin_of(written.origins, at)}: {sentence}", err=True)
    return recipe


@dataclass(frozen=True, slots=True)
class Written:
    """A recipe as it was written: its tree, and where each key stands."""

    tree: dict[str, Any]
    origins: dict[Loc, str]
    """Key to `file:line`, or to the override that set it."""

    @classmethod
    def read(cls, path: Path, overrides: Sequence[str]) -> Written:
        """A YAML file with overrides applied. Raises ConfigError, one line per problem."""
        tree, origins = read_yaml(path)
        found: list[str] = []
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
        text = path.read_text(encoding="utf-8")
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
    """Keys that stand twice in one section: YAML would silently keep the last."""
    if isinstance(node, yaml.MappingNode):
        seen: set[Hashable] = set()
        for key, value in node.value:
            where = (*at, str(key.value))
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
    """Remove retired keys and replace retired values in `tree`. Returns a line for the user for each of them.

    Raises UserError for a queue of several processes.
    """
    lines = []
    for (*path, last), instead in DROPPED_KEYS.items():
        section = _section(tree, path)
        if last in section:
            value = section.pop(last)
            name = ".".join(map(str, (*path, last)))
            origin = origins.pop((*path, last), name)
            if (*path, last) == SHARDS and value not in (1, "1", None):
                raise refusal(f"{origin}: {name} is {value}")
            lines.append(f"{origin}: {name} is no longer a key and is ignored: {instead}")
    for (*path, last), replacements in REPLACED_VALUES.items():
        section = _section(tree, path)
        value = section.get(last)
        if isinstance(value, str) and value in replacements:
            section[last] = replacements[value]
            name = ".".join(map(str, (*path, last)))
            origin = origins.get((*path, last), name)
            lines.append(f"{origin}: {name}={value} is no longer a value: {section[last]} is used")
    return lines


def _section(tree: Any, path: list[str | int]) -> dict[Any, Any]:
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}
