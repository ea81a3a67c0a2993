"""Prompts from reasoning-gym, whose tasks are made by code and scored offline: `data.reasoning_gym`.

    feeder, trainer ──what to make──▶ a process with PYTHONHASHSEED=0 ──one JSON line a row──▶ FileRow

The process is a fresh interpreter: five tasks draw in the order of a set, which depends on the hash seed, and a
feeder that is started again must make the same prompts. https://github.com/open-thought/reasoning-gym
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Final, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from meshrl.common.config import Config, Seed
from meshrl.common.python_process import start_with
from meshrl.contract.errors import ConfigError
from meshrl.trainer.data.files import FileRow


class ReasoningGymTaskConfig(Config):
    """One task of reasoning-gym."""

    weight: PositiveFloat = 1.0
    """Its share of the rows, beside the other tasks' weights."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Options of the task, as reasoning-gym names them."""


UNSCORABLE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks of reasoning-gym 0.1.25 whose rows have no answer."""


def _scorable(
    tasks: dict[str, ReasoningGymTaskConfig],
) -> dict[str, ReasoningGymTaskConfig]:
    if unscorable := sorted(tasks.keys() & UNSCORABLE):
        raise ValueError(f"rows of {', '.join(unscorable)} have no answer to score: leave it out")
    return tasks


class ReasoningGymCurriculumConfig(Config):
    """When a task of reasoning-gym moves to its next level: by its held-out score at the level that it has."""

    raise_at: float = Field(default=0.8, gt=0.0, le=1.0)
    """The score from which on the next level is asked."""


class ReasoningGymConfig(Config):
    """Prompts that reasoning-gym makes; the reward `reasoning_gym` scores the answers."""

    tasks: Annotated[dict[str, ReasoningGymTaskConfig], AfterValidator(_scorable)] = Field(
        min_length=1
    )
    """Tasks by their names in reasoning-gym: `chain_sum: {}`."""
    size: PositiveInt = 1000
    """Training prompts of all tasks together."""
    val_size: NonNegativeInt = 100
    """Held-out prompts of all tasks together; their questions are not asked in training."""
    seed: Seed = 0
    """Seed of the tasks and of their order."""
    levels: PositiveInt = 1
    """More than one: that many levels of each task's curriculum, in equal parts; a row's level is
    `extra_info.difficulty`, which `data.curriculum: difficulty` sorts by. Options of a task outrank its level's."""
    curriculum: ReasoningGymCurriculumConfig | None = None
    """Each task is asked at one level, which follows its held-out score; `{}` has the defaults. None: rows of all
    levels."""
    system_prompt: str = "Give your final answer between <answer> and </answer>."
    """Goes before each question; the reward looks for those marks. Empty: nothing."""
    chat: bool = True
    """Prompts are chats, for a tokenizer with a chat template; False: plain text."""

    @model_validator(mode="after")
    def _has_levels(self) -> Self:
        if self.curriculum and self.levels < 2:
            raise ValueError("curriculum needs levels: 2 or more")
        if self.curriculum and not self.val_size:
            raise ValueError("curriculum follows held-out scores: want val_size above 0")
        return self


PACKAGE: Final = "reasoning_gym"
NO_TASK: Final = frozenset({"composite"})
SPARE: Final = 4
"""Candidates for each held-out row: only questions that no training row asks are taken."""
REFUSED: Final = 3
"""The exit code of the process when the configuration is at fault; stderr ends with the reason."""


def gym_rows(config: ReasoningGymConfig, *, held_out: bool) -> Iterator[FileRow]:
    """The rows of all tasks, mixed in a seeded order: `prompt`, `answer`, `data_source`, `extra_info`.

    `extra_info` has what the reward `reasoning_gym` needs (`metadata`, a Python literal), the row's `index` in its
    task and its `difficulty`, the level of the task's curriculum. No held-out question is asked in training.

    Raises:
        ConfigError: the package is missing, no task has such a name, a task refuses its options, or a task has too
            few questions.
    """
    count = config.val_size if held_out else config.size
    if count:
        yield from _made(config, "held_out" if held_out else "train")


def check(config: ReasoningGymConfig) -> None:
    """Try names and options of all tasks and make no row. Raises ConfigError as `gym_rows` does."""
    for _ in _made(config, "check"):
        pass


def _made(config: ReasoningGymConfig, wanted: str) -> Iterator[FileRow]:
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            "data.reasoning_gym needs the package reasoning-gym: pip install 'meshrl[reasoning-gym]'"
        )
    words, environment = start_with({"PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"})
    process = subprocess.Popen(
        [*words, __name__, wanted],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=environment,
    )
    # Its stderr is a line or two, so it is read after stdout has ended.
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        process.stdin.write(config.model_dump_json())
        process.stdin.close()
        for number, line in enumerate(process.stdout):
            yield FileRow(f"data.reasoning_gym:{number}", json.loads(line), made=True)
        *_, reason = ["it ended without output", *process.stderr.read().splitlines()]
        if code := process.wait():
            what = "" if code == REFUSED else f"making rows ended with exit code {code}: "
            raise ConfigError(f"data.reasoning_gym: {what}{reason}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def shares(weights: Sequence[float], total: int) -> list[int]:
    """`total` in parts as large as `weights` say, each at most one off, by largest remainder."""
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda place: parts[place] - exact[place])
    for place in by_remainder[: total - sum(parts)]:
        parts[place] += 1
    return parts


class _Refusal(Exception):
    """Fault of the configuration, in words."""


def _make(config: ReasoningGymConfig, wanted: str) -> Iterator[Mapping[str, Any]]:
    """The rows, in the process that makes them."""
    from reasoning_gym import factory

    names = sorted(config.tasks)
    datasets = {name: _datasets(factory, name, config) for name in names}
    weights = [config.tasks[name].weight for name in names]
    train, held_out = shares(weights, config.size), shares(weights, config.val_size)
    for name, *counts in zip(names, train, held_out, strict=True) if config.curriculum else ():
        if min(counts) < config.levels:
            raise _Refusal(
                f"curriculum: each of {config.levels} levels of {name} wants a prompt for training and one for"
                " evaluation: raise size or val_size"
            )
    if wanted == "check":
        return
    rows: list[Mapping[str, Any]] = []
    for name, count, held in zip(names, train, held_out, strict=True):
        levels = [1.0] * config.levels
        parts = list(zip(shares(levels, count), shares(levels, held), strict=True))
        made = [
            dataset(some + SPARE * few)
            for dataset, (some, few) in zip(datasets[name], parts, strict=True)
        ]
        if wanted == "train":
            rows += [
                _row(name, index, level, made[level][index], config)
                for level, (some, _) in enumerate(parts)
                for index in range(some)
            ]
        else:
            rows += _unseen(name, made, parts, config)
    random.Random(config.seed).shuffle(rows)
    yield from rows


def _unseen(
    name: str, made: Sequence[Any], parts: Sequence[tuple[int, int]], config: ReasoningGymConfig
) -> Iterator[Mapping[str, Any]]:
    """Held-out rows of each level, made after its training rows: their questions occur once."""
    asked = {
        made[level][i]["question"] for level, (some, _) in enumerate(parts) for i in range(some)
    }
    for level, (some, few) in enumerate(parts):
        found = 0
        for index in range(some, some + SPARE * few):
            entry = made[level][index]
            if found < few and entry["question"] not in asked:
                asked.add(entry["question"])
                yield _row(name, index, level, entry, config)
                found += 1
        if found < few:
            raise _Refusal(
                f"tasks.{name} has only {found} questions for evaluation that training does not ask, of {few}:"
                " lower size or val_size, or give it harder options"
            )


def _row(
    name: str, index: int, level: int, entry: Mapping[str, Any], config: ReasoningGymConfig
) -> Mapping[str, Any]:
    question: str = entry["question"]
    messages = [{"role": "user", "content": question}]
    if config.system_prompt:
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    plain = f"{config.system_prompt}\n{question}" if config.system_prompt else question
    return {
        "prompt": messages if config.chat else plain,
        "answer": entry["answer"],
        "data_source": name,
        "extra_info": {
            "index": index,
            "difficulty": level,
            "metadata": repr(_plain(entry["metadata"])),
        },
    }


def _plain(value: Any) -> Any:
    """`value` without the scalars of numpy, which no literal has."""
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(_plain, value))
    return value.item() if hasattr(value, "dtype") else value


def _datasets(factory: Any, name: str, config: ReasoningGymConfig) -> list[Any]:
    """Functions from a number of rows to the data set, by level. Raises _Refusal."""
    known = sorted(factory.DATASETS.keys() - NO_TASK)
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {len(known)}, see its gallery"
        raise _Refusal(f"tasks.{name}: reasoning-gym has no such task; {hint}")
    given = config.tasks[name].config
    options = {field.name for field in dataclasses.fields(factory.DATASETS[name][1])}
    if unknown := sorted(given.keys() - (options - {"seed", "size"})):
        takes = ", ".join(sorted(options - {"seed", "size"})) or "none"
        raise _Refusal(f"tasks.{name}.config: no option {unknown[0]!r} (it takes: {takes})")
    if config.levels > 1 and not factory.has_curriculum(name):
        raise _Refusal(f"tasks.{name} has no levels: set levels to 1 or leave it out")

    def of_level(level: int) -> Any:
        fixed = given
        if config.levels > 1:
            curriculum = factory.create_curriculum(name)
            curriculum.set_global_level(level)
            fixed = {**dataclasses.asdict(curriculum.generate_configuration()), **given}

        def dataset(size: int) -> Any:
            try:
                return factory.create_dataset(
                    name, **{**fixed, "seed": config.seed, "size": max(size, 1)}
                )
            except (AssertionError, TypeError, ValueError) as error:
                raise _Refusal(f"tasks.{name}.config: {error}") from error

        dataset(1)
        return dataset

    return [of_level(level) for level in range(config.levels)]


def main() -> int:
    """Make what stdin describes."""
    # Whatever a task prints is no row.
    rows_out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    config = ReasoningGymConfig.model_validate_json(sys.stdin.read())
    try:
        for row in _make(config, sys.argv[1]):
            rows_out.write(json.dumps(row) + "\n")
    except _Refusal as refusal:
        sys.stderr.write(f"{refusal}\n")
        return REFUSED
    rows_out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
