"""Checks of the `reward` section: options and packages of functions and judges, their files, their isolation."""

from __future__ import annotations

from collections.abc import Iterator
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
from meshrl.contract.errors import ConfigError, MeshError
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


def _check_built_in(
    at: Loc, function: RewardFunctionConfig, reward: RewardConfig, machine: Machine, model: Path
) -> Iterator[Problem]:
    """Arguments of a function, its packages, and the isolation that it is to have."""
    yield from check_options(
        (*at, "kwargs"), REWARDS, function.name, function.kwargs, machine, model
    )
    yield from check_required((*at, "name"), REWARDS, function.name, machine)
    wants = plugins.constant(REWARDS, function.name, "NEEDS_SANDBOX", "")
    if wants and reward.recipe_sandbox.value != wants:
        yield (
            (*at, "name"),
            f"{dotted(at)}.name: {function.name} runs programs of the policy: set"
            f" reward.recipe_sandbox: {wants}",
        )


def _check_file(
    at: Loc, path: Path, function: RewardFunctionConfig, machine: Machine
) -> Iterator[Problem]:
    """A reward's file parses, defines the function, and the function takes what it is called with."""
    found = list(missing_file((*at, "path"), path, machine))
    yield from found
    if found:
        return
    wanted = f"{function.name}{SIGNATURE}"
    try:
        source = machine.text(path)
        node = find_function(source, function.name, wanted, str(path), ConfigError)
        if node is not None:
            check_call(node, FunctionKind.COMPUTE_SCORE, function.kwargs, str(path))
    except MeshError as error:
        yield (*at, "path"), f"{dotted(at)}: {error}"
