"""The names in a recipe that are modules: whether each is known, takes its options, and has what it requires here.

What needs torch, or is someone's own module, is looked up and not imported.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, TypeGuard

from meshrl.common import plugins
from meshrl.common.config import read_options
from meshrl.config.explain import Loc
from meshrl.config.file_checks import Problem
from meshrl.config.machine import ThisMachine
from meshrl.config.recipe import Recipe
from meshrl.config.weights import CARRIERS
from meshrl.contract.errors import ConfigError
from meshrl.rewardd.config import JUDGES, OTHER_PACKAGES
from meshrl.rewardd.pool.rule import REWARDS
from meshrl.sandbox.sandbox import Isolation
from meshrl.trainer.algorithms.recipe_defaults import homes
from meshrl.trainer.data.files import READERS

PROGRAMS = "meshrl.rollout.programs"
ENGINES = "meshrl.rollout.engines"
STORES = "meshrl.transferqueue.stores"
LOGGERS = "meshrl.trainer.loggers"
LIBRARIES: Mapping[str, str] = {
    "nccl": "meshrl.weights.nccl.libraries",
    "cuda_ipc": "meshrl.weights.ipc.devices",
}
"""Carriers that use a GPU, by a library of these packages."""
NAMES: Mapping[str, str] = {
    "rollout.name": ENGINES,
    "rollout.program": PROGRAMS,
    "queue.store": STORES,
    "queue.sampler": "meshrl.transferqueue.samplers",
    "weights.carrier": CARRIERS,
    "weights.nccl.library": LIBRARIES["nccl"],
    "weights.ipc.library": LIBRARIES["cuda_ipc"],
    "algorithm.adv_estimator": "meshrl.trainer.algorithms.advantages",
    "actor.policy_loss.loss_mode": "meshrl.trainer.algorithms.losses",
    "data.reader": READERS,
    "data.curriculum": "meshrl.trainer.data.curricula",
}
"""Key to the package whose modules may be named there; another module by its dotted path."""


def plugin_checks(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    """Names, then options, then what they require; an unknown name is answered once."""
    wrong = list(_names(recipe))
    yield from wrong
    unknown = {at for at, _ in wrong}
    yield from _program_options(recipe, machine)
    if ("rollout", "name") not in unknown:
        at: Loc = ("rollout", "engine")
        yield from _options(
            at, ENGINES, recipe.rollout.name, recipe.rollout.engine, recipe, machine
        )
        yield from _cuts(recipe)
        yield from _served_adapters(recipe)
        yield from _lent_memory(recipe)
    for index, judge in enumerate(recipe.reward.judges):
        at = ("reward", "judges", index)
        if (*at, "kind") not in unknown:
            module = OTHER_PACKAGES.get(judge.kind, judge.kind)
            options: Loc = (*at, "options")
            yield from _options(options, JUDGES, module, judge.options, recipe, machine, "kind")
    yield from _rewards(recipe, machine, unknown)
    if ("queue", "store") not in unknown:
        yield from _required(("queue", "store"), STORES, recipe.queue.store, machine)
    yield from _carrier(recipe, machine, unknown)


def _options(
    at: Loc,
    package: str,
    name: str,
    given: Mapping[str, Any],
    recipe: Recipe,
    machine: ThisMachine,
    named: str = "name",
) -> Iterator[Problem]:
    """Options against the module's `Config`, and what they ask of the machine; `named` is the key of the name."""
    kind, key = plugins.config_class(package, name), ".".join(map(str, at))
    if kind is None:
        return
    try:
        options = read_options(kind, given, where=key)
    except ConfigError as error:
        below = error.details["key"].removeprefix(key).strip(".")
        yield (*at, *(below.split(".") if below else ())), str(error)
        return
    faults = getattr(options, "faults", None)
    for option, text in faults(machine, recipe.model.path) if faults else ():
        where = (*at, option) if option else (*at[:-1], named)
        yield where, f"{'.'.join(map(str, where))}: {text}"


def _cuts(recipe: Recipe) -> Iterator[Problem]:
    """Where top_k and top_p cut together, the engine must cut as the recipe says."""
    rollout = recipe.rollout
    asked = [rollout.sampling(max_tokens=1, seed=0), rollout.val_sampling(max_tokens=1, seed=0)]
    twice = next((sampling for sampling in asked if sampling.cuts_twice), None)
    kind = plugins.config_class(ENGINES, rollout.name)
    joint = bool(getattr(kind, "joint_cut", False))
    if twice is not None and kind is not None and twice.joint_cut != joint:
        rule = "of the whole distribution" if joint else "of what top_k has left"
        yield (
            ("rollout", "top_k_top_p"),
            f"rollout.top_k_top_p: top_k {twice.top_k} with top_p {twice.top_p}: {rollout.name} takes top_p {rule};"
            f" want {'joint' if joint else 'sequential'} to accept that, or one of the two alone",
        )


def _served_adapters(recipe: Recipe) -> Iterator[Problem]:
    """An engine that serves adapters gets adapters, and as large ones as it has room for."""
    most, rank = recipe.rollout.engine.get("max_lora_rank"), recipe.model.lora_rank
    if not isinstance(most, int) or not most:
        return
    if not rank:
        says = "whole weights: want model.lora_rank, or no max_lora_rank"
    elif recipe.model.use_dora:
        says = "DoRA's merged weights, for engines serve plain LoRA: want no max_lora_rank, or model.use_dora=false"
    elif rank > most:
        says = f"adapters of rank {rank}: want at least that"
    else:
        return
    at: Loc = ("rollout", "engine", "max_lora_rank")
    yield at, f"rollout.engine.max_lora_rank: {most}, and the trainer sends {says}"


def _lent_memory(recipe: Recipe) -> Iterator[Problem]:
    """A server has memory of its device for what NCCL brings alone."""
    rollout, weights = recipe.rollout, recipe.weights
    asked = rollout.engine.get("weight_staging") == "device"
    if asked and rollout.name in ("vllm", "sglang") and "nccl" not in weights.choices:
        yield (
            ("rollout", "engine", "weight_staging"),
            f"rollout.engine.weight_staging: device, and weights.carrier {weights.carrier} brings weights"
            " to the host: want nccl there, or auto or host here",
        )


def _required(at: Loc, package: str, name: str, machine: ThisMachine) -> Iterator[Problem]:
    """The packages that a module lists as `REQUIRES`."""
    for required in plugins.constant(package, name, "REQUIRES", ()):
        if not machine.installed(required):
            yield (
                at,
                f"{'.'.join(map(str, at))}: {name} needs the package {required}, which is not installed",
            )


def _rewards(recipe: Recipe, machine: ThisMachine, unknown: set[Loc]) -> Iterator[Problem]:
    """Arguments of built-in functions, their packages, and the isolation that they are to have."""
    reward = recipe.reward
    for index, function in enumerate(reward.functions):
        at: Loc = ("reward", "functions", index)
        if function.path is not None or (*at, "name") in unknown:
            continue
        yield from _options(
            (*at, "kwargs"), REWARDS, function.name, function.kwargs, recipe, machine
        )
        yield from _required((*at, "name"), REWARDS, function.name, machine)
        wants = plugins.constant(REWARDS, function.name, "NEEDS_SANDBOX", "")
        if wants and reward.recipe_sandbox.value != wants:
            yield (
                (*at, "name"),
                f"reward.functions.{index}.name: {function.name} runs programs of the policy: set"
                f" reward.recipe_sandbox: {wants}",
            )
    if reward.recipe_sandbox is Isolation.STRICT and (why := machine.no_sandbox):
        yield (
            ("reward", "recipe_sandbox"),
            f"reward.recipe_sandbox: strict is not available here: {why}",
        )


def _carrier(recipe: Recipe, machine: ThisMachine, unknown: set[Loc]) -> Iterator[Problem]:
    """A carrier between GPUs needs its library and a GPU; `auto` leaves out those that cannot run."""
    weights = recipe.weights
    package = LIBRARIES.get(weights.carrier)
    at: Loc = ("weights", "carrier")
    if package is None:
        if at not in unknown:
            yield from _required(at, CARRIERS, weights.carrier, machine)
        return
    section = "nccl" if weights.carrier == "nccl" else "ipc"
    library = getattr(weights, section).library
    if ("weights", section, "library") in unknown:
        return
    required = list(_required(("weights", section, "library"), package, library, machine))
    for _, text in required:
        yield at, f"weights.carrier: {weights.carrier}: {text}"
    if not required and plugins.constant(package, library, "REQUIRES", ()) and not machine.gpus:
        yield (
            at,
            f"weights.carrier: {weights.carrier} moves weights between GPUs, and this machine has"
            f" {machine.no_gpu}",
        )


def _names(recipe: Recipe) -> Iterator[Problem]:
    """Every name that is a file name. Looked up, not imported: an engine may import torch."""
    for key, package in NAMES.items():
        name: str | None = attrgetter(key)(recipe)
        if name is not None:
            yield from _name(tuple(key.split(".")), package, name)
    for index, logger in enumerate(recipe.trainer.logger):
        yield from _name(("trainer", "logger", index), LOGGERS, logger)
    for index, function in enumerate(recipe.reward.functions):
        if function.path is None:
            at_function: Loc = ("reward", "functions", index, "name")
            yield from _name(at_function, REWARDS, function.name)
    for index, judge in enumerate(recipe.reward.judges):
        if judge.kind not in OTHER_PACKAGES:
            others = tuple(OTHER_PACKAGES)
            yield from _name(("reward", "judges", index, "kind"), JUDGES, judge.kind, others)


def names_at(key: str) -> tuple[str, ...]:
    """The modules that may be named at a key of a recipe; empty where the key names none."""
    if key == "algorithm.name":
        return tuple(homes())
    package = {**NAMES, "trainer.logger": LOGGERS}.get(key)
    return tuple(sorted(plugins.known(package))) if package else ()


def imported(tree: Mapping[str, Any]) -> list[str]:
    """The dotted names in a recipe's sections that a check imports; it finds the others and reads their source."""
    algorithm, actor, stages = (_section(tree, key) for key in ("algorithm", "actor", "stages"))
    named = [algorithm.get("name"), *(_section(stages, name).get("kind") for name in stages)]
    formulas = (algorithm.get("adv_estimator"), _section(actor, "policy_loss").get("loss_mode"))
    dotted = [name for name in named if _is_dotted(name)]
    for formula in formulas:
        if _is_dotted(formula) and (place := plugins.class_place("", formula, "Options")):
            dotted.append(place[0])
    return list(dict.fromkeys(dotted))


def _section(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = tree.get(key)
    return section if isinstance(section, Mapping) else {}


def _is_dotted(name: object) -> TypeGuard[str]:
    return isinstance(name, str) and "." in name


def _program_options(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    """Those of the mesh's own programs, which are light to import; what they name is loaded by a worker."""
    name, options = recipe.rollout.program, recipe.rollout.program_options
    if name not in plugins.known(PROGRAMS):
        return
    program, key = importlib.import_module(f"{PROGRAMS}.{name}"), "rollout.program_options"
    if not hasattr(program, "Config"):
        if options:
            yield ("rollout", "program_options"), f"{key}: the program {name!r} takes none"
        return
    try:
        config = read_options(program.Config, options, where=key)
        if hasattr(program, "check"):
            program.check(config)
        faults = getattr(config, "faults", None)
        for option, text in faults(machine, recipe.model.path) if faults else ():
            yield ("rollout", "program_options", *option.split(".")), f"{key}.{option}: {text}"
    except ConfigError as error:
        yield ("rollout", "program_options"), str(error)


def _name(at: Loc, package: str, name: str, others: tuple[str, ...] = ()) -> Iterator[Problem]:
    key = ".".join(map(str, at))
    if "." in name:
        if plugins.find(name) is None:
            hint = plugins.where_it_stands(name)
            yield at, f"{key}: no module {name!r} can be imported{hint}"
        return
    names = tuple(sorted((*plugins.known(package), *others)))
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        yield at, f"{key}: got {name!r}{hint} (known: {', '.join(names)}, or a dotted path)"
