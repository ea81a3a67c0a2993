"""Checks of the `reward` section: options and packages of functions and judges, their files, their isolation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from meshrl.common import plugins
from meshrl.common.checks import (
    Loc,
    Problem,
    check_options,
    check_required,
    dotted,
    missing_file,
)
from meshrl.common.config import Machine
from meshrl.contract.errors import ConfigError, MeshError, UserError
from meshrl.rewardd.config import JUDGES, OTHER_PACKAGES, RewardConfig, RewardFunctionConfig
from meshrl.rewardd.pool.rule import REWARDS, SIGNATURE, check_call, find_function
from meshrl.rewardd.pool.signatures import FunctionKind
from meshrl.sandbox.sandbox import Isolation


def check_reward(reward: RewardConfig, machine: Machine, model: Path) -> Iterator[Problem]:
    """Every problem of the section."""
    if (tokens := reward.registry.tokens) is not None:
        yield from missing_file(("reward", "registry", "tokens"), tokens, machine)
    for index, function in enumerate(reward.functions):
        at: Loc = ("reward", "functions", index)
        if function.path is not None:
            yield from _check_file(at, function.path, function, machine)
        else:
            yield from _check_built_in(at, function, reward, machine, model)
    custom = reward.custom_reward_function
    if custom.path is not None:
        own = RewardFunctionConfig(name=custom.name, path=custom.path, kwargs=custom.reward_kwargs)
        yield from _check_file(("reward", "custom_reward_function"), custom.path, own, machine)
    for index, judge in enumerate(reward.judges):
        at = ("reward", "judges", index)
        module = OTHER_PACKAGES.get(judge.kind, judge.kind)
        yield from check_options(
            (*at, "options"), JUDGES, module, judge.options, machine, model, named="kind"
        )
    if reward.recipe_sandbox is Isolation.STRICT and (why := machine.no_sandbox):
        yield (
            ("reward", "recipe_sandbox"),
            f"reward.recipe_sandbox: strict is not available here: {why}",
        )


def unscored(reward: RewardConfig, data_source: str) -> str:
    """The reason why the built-in `verl` cannot score rows of a data_source; empty where it can, or scores none."""
    if not any(function.name == "verl" and function.path is None for function in reward.scorers):
        return ""
    # Imported here: it imports every scorer, and few recipes need it.
    from meshrl.rewardd.rewards import code, verl

    try:
        scorer = verl.scorer_of(data_source)
    except UserError as error:
        return error.message
    if scorer is code and reward.recipe_sandbox is not Isolation.STRICT:
        return f"data_source {data_source!r}: {_wants_sandbox('code', code.NEEDS_SANDBOX)}"
    return ""


def _wants_sandbox(name: str, level: str) -> str:
    return f"{name} runs programs of the policy: set reward.recipe_sandbox: {level}"


def _check_built_in(
    at: Loc, function: RewardFunctionConfig, reward: RewardConfig, machine: Machine, model: Path
) -> Iterator[Problem]:
    """Arguments of a function, its packages, and the isolation that it is to have."""
    yield from check_options(
        (*at, "kwargs"), REWARDS, function.name, function.kwargs, machine, model
    )
    yield from check_required((*at, "name"), REWARDS, function.name, machine)
    module = plugins.find(function.name) if "." in function.name else None
    if module is not None and module.origin and module.origin.endswith(".py"):
        # The options of a module with a class of them are its own to read.
        own = plugins.class_place(REWARDS, function.name, "Config") is not None
        given = ["config"] if own else function.kwargs
        if wrong := _uncallable(Path(module.origin), "compute_score", given, machine):
            yield (*at, "name"), f"{dotted(at)}.name: {wrong}"
    wants = plugins.constant(REWARDS, function.name, "NEEDS_SANDBOX", "")
    if wants and reward.recipe_sandbox.value != wants:
        yield (*at, "name"), f"{dotted(at)}.name: {_wants_sandbox(function.name, wants)}"


def _check_file(
    at: Loc, path: Path, function: RewardFunctionConfig, machine: Machine
) -> Iterator[Problem]:
    """A reward's file parses, defines the function, and the function takes what it is called with."""
    found = list(missing_file((*at, "path"), path, machine))
    yield from found
    if (
        not found
        and machine.known(path)
        and (wrong := _uncallable(path, function.name, function.kwargs, machine))
    ):
        yield (*at, "path"), f"{dotted(at)}: {wrong}"


def _uncallable(path: Path, name: str, keywords: Iterable[str], machine: Machine) -> str:
    """Why the function `name` of a file cannot be called with a sample and `keywords`; empty where it can."""
    try:
        node = find_function(machine.text(path), name, f"{name}{SIGNATURE}", str(path), ConfigError)
        if node is not None:
            check_call(node, FunctionKind.COMPUTE_SCORE, keywords, str(path))
    except MeshError as error:
        return str(error)
    return ""
