"""The content of the files that a recipe names, as far as a run depends on it: data, models, rewards, programs."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from meshrl.common import plugins
from meshrl.config.recipe import Recipe
from meshrl.rollout.server_engine.checkpoint import read_header
from meshrl.trainer.data.reasoning_gym import PACKAGE

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
        """Without its folder."""
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
        yield "data.reasoning_gym", [package]  # its version stands there
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
