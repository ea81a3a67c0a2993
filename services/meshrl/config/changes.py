"""The changes of a recipe, and of the files that it names, that a run may continue with.

`changes` is a pure function of the old recipe and the new one. A reported key may change, a bending one makes the
rest another run than its beginning, and queue or checkpoints hold what cannot change. A key that is not listed
here is reported.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import xxhash
from pydantic import ValidationError

from meshrl.common import plugins
from meshrl.common.checks import Loc
from meshrl.config.recipe import Recipe, algorithm_needs, has_evaluation
from meshrl.config.stages import eval_spec, train_spec
from meshrl.contract.errors import MeshError
from meshrl.contract.types import RunSpec
from meshrl.rollout.server_engine.checkpoint import read_header
from meshrl.trainer.data.reasoning_gym import PACKAGE

BENDS = (
    "run.seed",
    "model.path",
    "model.tokenizer_path",
    "data",
    "reference.path",
    "critic.path",
    "rollout.program",
    "rollout.program_options",
    "stages",
    "reward.functions",
    "reward.judges",
    "reward.custom_reward_function",
    "reward.registry.name",
)
"""Keys, and sections, that say what is learned and from what."""
BENDS_NOT = ("data.max_response_length",)
"""Exceptions in those sections."""
HELD_BY_QUEUE = ("run.name", "queue.store", "queue.redis_prefix")
"""Keys that the queue holds, besides those in the specs of its runs."""
ADAPTER = (
    "model.lora_rank",
    "model.lora_alpha",
    "model.use_rslora",
    "model.use_dora",
    "model.target_modules",
    "model.exclude_modules",
)
HELD_BY_CHECKPOINTS = (
    "model.freeze_vision_tower",
    "actor.optim.name",
    "critic.optim.name",
)
"""Keys that checkpoints hold, besides the adapter and the models that the algorithm trains."""
ELSEWHERE = ("run.dir", "placement.machines", "weights.host")
"""Keys that say where a run is, which changes from start to start."""


class Effect(StrEnum):
    """The effect of a change on a run that continues."""

    TOLD = "told"
    BENDS = "bends"
    QUEUE = "queue"
    """The queue holds it from the run's first start on."""
    CHECKPOINTS = "checkpoints"
    """The checkpoints hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key that is not as before."""

    key: str
    before: Any
    """The JSON value; None for a new key."""
    now: Any
    effect: Effect


def changes(before: Recipe, now: Recipe) -> list[Change]:
    """Every key that differs, in the order of the recipe. Both have absolute paths."""
    had, has = _flat(before), _flat(now)
    of_specs = list(_of_specs(before, now))
    found = [
        Change(
            key=dotted(at),
            before=had.get(at),
            now=has.get(at),
            effect=_effect(at, before, now, opens_another=bool(of_specs)),
        )
        for at in {**has, **had}
        if had.get(at) != has.get(at) and not _under(dotted(at), ELSEWHERE)
    ]
    named = any(change.effect is Effect.QUEUE for change in found)
    return found if named else [*found, *of_specs]


def dotted(at: Loc) -> str:
    """A key as a person writes it."""
    return ".".join(map(str, at))


def _effect(at: Loc, before: Recipe, now: Recipe, *, opens_another: bool) -> Effect:
    key = dotted(at)
    with_adapter = bool(before.model.lora_rank or now.model.lora_rank)
    alone, without = _with(before, at, now), _with(now, at, before)
    if _under(key, HELD_BY_QUEUE):
        return Effect.QUEUE
    # The key changes what the queue is asked for, by itself or together with others.
    if opens_another and (_differ(before, alone) or _differ(now, without)):
        return Effect.QUEUE
    if _under(key, HELD_BY_CHECKPOINTS) or (with_adapter and _under(key, ADAPTER)):
        return Effect.CHECKPOINTS
    if alone is not None and _models_beside(alone) - _models_beside(before):
        return Effect.CHECKPOINTS
    if _under(key, BENDS) and not _under(key, BENDS_NOT) and at[-1] != "workers":
        return Effect.BENDS
    return Effect.TOLD


def _under(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _flat(recipe: Recipe) -> dict[Loc, Any]:
    return dict(_leaves(recipe.model_dump(mode="json"), ()))


def _leaves(value: Any, at: Loc) -> Iterator[tuple[Loc, Any]]:
    """Every value that is no section, no list of sections, and no empty list, which may be one of either."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*at, key))
    elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*at, index))
    elif value != []:
        yield at, value


def _with(recipe: Recipe, at: Loc, other: Recipe) -> Recipe | None:
    """The recipe with one value of another one; None where that is no recipe."""
    tree = recipe.model_dump(mode="json")
    here: Any = tree
    given: Any = other.model_dump(mode="json")
    try:
        for part in at[:-1]:
            here = here.setdefault(part, {}) if isinstance(here, dict) else here[part]
            given = given.get(part, {}) if isinstance(given, dict) else given[part]
        if at[-1] in given:
            here[at[-1]] = given[at[-1]]
        else:
            del here[at[-1]]
        return Recipe.model_validate(tree)
    except (LookupError, TypeError, AttributeError, ValidationError):
        return None


def _models_beside(recipe: Recipe) -> set[str]:
    """The models that are trained, and saved, beside the policy."""
    needs = algorithm_needs(recipe)
    return {name for name in ("critic", "implicit_reward") if getattr(needs, name)}


def _differ(recipe: Recipe, other: Recipe | None) -> bool:
    return other is not None and any(True for _ in _of_specs(recipe, other))


def _of_specs(before: Recipe, now: Recipe) -> Iterator[Change]:
    """Differences between the runs that were opened in the queue and those that would be opened now."""
    had, has = _specs(before), _specs(now)
    for name in had.keys() & has.keys():
        for field in dataclasses.fields(RunSpec):
            old, new = getattr(had[name], field.name), getattr(has[name], field.name)
            if field.name != "run" and old != new:
                yield Change(key=field.name, before=old, now=new, effect=Effect.QUEUE)


def _specs(recipe: Recipe) -> dict[str, RunSpec]:
    """The runs of training and evaluation; none of a recipe whose stages cannot be told here."""
    try:
        evaluation = {"evaluation": eval_spec(recipe)} if has_evaluation(recipe) else {}
        return {"training": train_spec(recipe), **evaluation}
    except MeshError:
        return {}


BLOCK_BYTES = 1 << 20
WEIGHTS = (".safetensors", ".bin")
WHOLE_BYTES = 1 << 30
"""Files of weights that are larger are not read whole: a start would wait for minutes."""
SAMPLED_BLOCKS = 256
"""Blocks read of such a file, at equal distances, with its beginning and its end: other weights differ everywhere."""
MODEL_FILES = frozenset(
    {".safetensors", ".bin", ".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}
)
"""Suffixes of a checkpoint's files that say what it does: weights, tokenizer, chat template, architecture."""
LONGEST_PATH = 1000
"""Characters of an option that may be the path of a file."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The content of one file."""

    path: str
    size: int
    mtime_ns: int
    digest: str
    """xxh3-128 of its bytes; of a large file of weights, of some."""

    @property
    def name(self) -> str:
        """The file's name, without its folder."""
        return Path(self.path).name


Content = Mapping[str, tuple[Mark, ...]]
"""The files that a key names, by key. A key whose files are not here is left out."""


def content_of(recipe: Recipe, known: Content, sections: Collection[str] | None) -> Content:
    """The content of what `recipe`, whose paths are absolute, names in these sections; None: in all.

    A file that is as in `known` is not read again.
    """
    found = {}
    for key, paths in _files_of(recipe):
        if sections is not None and key.partition(".")[0] not in sections:
            continue
        marks = {mark.path: mark for mark in known.get(key, ())}
        try:
            found[key] = tuple(_mark(path, marks.get(str(path))) for path in paths)
        except OSError:  # another machine's
            continue
    return {key: marks for key, marks in found.items() if marks}


def _files_of(recipe: Recipe) -> Iterator[tuple[str, list[Path]]]:
    """The files whose content a run depends on, by the key that names them."""
    models = {
        "model.path": recipe.model.path,
        "model.tokenizer_path": recipe.model.tokenizer_path,
        "reference.path": recipe.reference.path,
        "critic.path": recipe.critic.path,
    }
    for key, directory in models.items():
        if directory is not None:
            yield key, _model_files(directory)
    yield "data.train_files", list(recipe.data.train_files)
    yield "data.val_files", list(recipe.data.val_files)
    reward = recipe.reward
    if (own := reward.custom_reward_function).path is not None:
        yield "reward.custom_reward_function.path", [own.path]
    modules = {
        "data.reader": recipe.data.reader,
        "data.curriculum": recipe.data.curriculum,
        "rollout.program": recipe.rollout.program,
        **{f"stages.{name}.kind": stage.kind for name, stage in recipe.stages.items()},
        **{f"reward.judges.{n}.kind": judge.kind for n, judge in enumerate(reward.judges)},
    }
    for number, function in enumerate(reward.functions):
        if function.path is not None:
            yield f"reward.functions.{number}.path", [function.path]
        else:
            modules[f"reward.functions.{number}.name"] = function.name
    if recipe.data.reasoning_gym is not None and (package := _source(PACKAGE)) is not None:
        yield "data.reasoning_gym", [package]  # its version is there
    for key, module in modules.items():
        if module and "." in module and (source := _source(module)) is not None:
            yield key, [source]
    options: dict[str, Any] = {
        "rollout.program_options": recipe.rollout.program_options,
        "reward.custom_reward_function.reward_kwargs": own.reward_kwargs,
        **{f"reward.functions.{n}.kwargs": f.kwargs for n, f in enumerate(reward.functions)},
        **{f"reward.judges.{n}.options": judge.options for n, judge in enumerate(reward.judges)},
        **{f"stages.{name}.options": stage.options for name, stage in recipe.stages.items()},
    }
    for key, value in options.items():
        yield key, list(_named_files(value))


def _model_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(p for p in directory.iterdir() if p.suffix in MODEL_FILES and p.is_file())


def _source(module: str) -> Path | None:
    """The file of a module that a recipe names by a dotted path."""
    spec = plugins.find(module)
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _named_files(options: Any) -> Iterator[Path]:
    """The files and models among the texts of options: `table.json`, `agent.py:solve`, a directory of a model."""
    if isinstance(options, Mapping):
        for value in options.values():
            yield from _named_files(value)
    elif isinstance(options, list | tuple):
        for value in options:
            yield from _named_files(value)
    elif isinstance(options, str) and 0 < len(options) < LONGEST_PATH:
        for text in dict.fromkeys((options, options.rpartition(":")[0])):
            path = Path(text)
            try:
                if text and path.is_file():
                    yield path.absolute()
                elif text and (path / "config.json").is_file():
                    yield from _model_files(path.absolute())
            except (OSError, ValueError):
                continue


def _mark(path: Path, known: Mark | None) -> Mark:
    """The content of a file, which is not read where size and time are as in `known`. Raises OSError."""
    status = path.stat()
    if known is not None and (known.size, known.mtime_ns) == (status.st_size, status.st_mtime_ns):
        return known
    digest, size = xxhash.xxh3_128(), status.st_size
    starts: Iterable[int] = range(0, size, BLOCK_BYTES)
    if size > WHOLE_BYTES and path.suffix in WEIGHTS:
        last = SAMPLED_BLOCKS - 1
        starts = (block * (size - BLOCK_BYTES) // last for block in range(last + 1))
    with path.open("rb") as file:
        for start in starts:
            file.seek(start)
            digest.update(file.read(BLOCK_BYTES))
    return Mark(str(path), size, status.st_mtime_ns, digest.hexdigest())


def shapes_of(model: Path) -> str:
    """Hash of the names and shapes of a model's tensors; empty where they cannot be read."""
    shapes: list[tuple[str, list[int]]] = []
    try:
        for file in sorted(model.glob("*.safetensors")):
            header, _ = read_header(file)
            shapes += [(name, entry["shape"]) for name, entry in header.items()]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return xxhash.xxh3_128_hexdigest(json.dumps(sorted(shapes)).encode()) if shapes else ""
