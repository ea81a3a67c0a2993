from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
"""Every check of a recipe, section by section, and what only several sections together can tell.
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
What one section can tell stands beside it: `checks.py` of trainer, rollout and rewardd, `check_stages`, and `check`
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
in the configurations of queue and weights. Each check yields the key to change and one sentence. None imports torch,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
runs a user's file or starts anything.
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
"""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from __future__ import annotations
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
import difflib
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
import math
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from collections.abc import Iterator, Mapping
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from itertools import chain
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from operator import attrgetter
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from pathlib import Path
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from typing import Any, TypeGuard
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.common import plugins
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.common.checks import Loc, Problem, dotted
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.config.device_defaults import hints
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.config.machine import ThisMachine
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.config.placement import place
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.config.recipe import Recipe, algorithm_needs, trains_each_branch
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.config.stages import check_stages
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.config.weights import CARRIERS, LIBRARIES
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.contract.errors import ConfigError
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.contract.held_rows import RENEWALS
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.rewardd.checks import check_reward
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.rewardd.config import JUDGES, OTHER_PACKAGES
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.rewardd.pool.rule import REWARDS
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.rollout.checks import ENGINES, PROGRAMS, check_rollout
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.sandbox.sandbox import Isolation
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.trainer.algorithms import needs as algorithm_rules
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.trainer.algorithms.recipe_defaults import homes
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.trainer.checks import (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    DataUse,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    check_checkpoint,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    check_data,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    check_experts,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    check_model,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    check_parallel,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    check_trainable,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.trainer.data.files import READERS
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.transferqueue.config import STORES
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
LOGGERS = "meshrl.trainer.loggers"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
NAMES: Mapping[str, str] = {
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    "rollout.name": ENGINES,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    "rollout.program": PROGRAMS,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    "queue.store": STORES,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    "queue.sampler": "meshrl.transferqueue.samplers",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    "weights.carrier": CARRIERS,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    "weights.nccl.library": LIBRARIES["nccl"],
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    "weights.ipc.library": LIBRARIES["cuda_ipc"],
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    "algorithm.adv_estimator": algorithm_rules.ADVANTAGES,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    "actor.policy_loss.loss_mode": algorithm_rules.LOSSES,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    "data.reader": READERS,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    "data.curriculum": "meshrl.trainer.data.curricula",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
}
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
"""Key to the package whose modules may be named there; another module by its dotted path."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
PICTURE_ENGINES = ("vllm", "sglang")
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
PICTURE_PROGRAMS = ("single_turn", "tools", "user", "openai")
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
"""Built-in programs that hand a task's pictures to the engine."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
MANY_RENEWALS, CALM_RENEWALS = 300, 100
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
"""Calls a second of a queue process above which there is a warning, and what it asks for (docs/how-to/scale.md)."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
PICTURE_PACKAGES = {"PIL": "pillow", "msgpack": "msgpack"}
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def cross_checks(recipe: Recipe, machine: ThisMachine | None = None) -> Iterator[Problem]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    """Every problem; `machine` is the one that will run the recipe, or this one."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    machine = machine or ThisMachine()
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    pictures = "vision_config" in machine.json(recipe.model.path / "config.json")
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    data_use = DataUse(
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        tokenizer=recipe.tokenizer_dir,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        pictures=pictures,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        own_answers=algorithm_needs(recipe).data_answers,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        test_freq=recipe.trainer.test_freq,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    right = True
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    for problem in chain(
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        _names(recipe),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        check_model(recipe.model, machine),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        check_data(recipe.data, data_use, machine),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        check_parallel(recipe.trainer, recipe.model, machine),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        check_experts(recipe.actor, recipe.model, machine),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        check_rollout(recipe.rollout, machine, recipe.model.path),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        check_reward(recipe.reward, machine, recipe.model.path),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        recipe.queue.check(machine, samples=recipe.rollout.n),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        recipe.weights.check(machine),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        check_stages(recipe),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        _sizes(recipe, machine),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        _models(recipe, machine),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        _routing_replay(recipe, machine),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        _pictures(recipe, machine) if pictures else (),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        _served_adapters(recipe),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        _lent_memory(recipe),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        _evaluated(recipe),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        _algorithm(recipe),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        _packages(recipe, machine),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    ):
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        right = False
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield problem
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    # What has another fault may be placed differently once that is mended.
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if right:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        try:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            problems = list(place(recipe, machine).problems())
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        except ConfigError as error:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            problems = [str(error)]
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        # No service has the section: the others may be elsewhere.
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield from ((("placement",), problem) for problem in problems)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def warnings(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    """What would start, and hardly be meant: the key and one sentence."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    rows = recipe.rollout.n
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if why := algorithm_rules.cannot_learn(recipe.algorithm, recipe.actor, rows=rows):
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield ("rollout", "n"), f"rollout.n: {why}"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    yield from ((("rollout", "name"), hint) for hint in hints(recipe, machine))
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    workers, queue = recipe.rollout.workers, recipe.queue
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    renewals = workers * RENEWALS / queue.lease_ttl_s
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if renewals > MANY_RENEWALS:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        calm = math.ceil(queue.lease_ttl_s * renewals / CALM_RENEWALS)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            ("queue", "lease_ttl_s"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f"queue.lease_ttl_s: {workers} workers would renew their leases {renewals:.0f} times a second at the"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f" queue, which answers some 700 calls; want {calm}",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def _names(recipe: Recipe) -> Iterator[Problem]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    """Every name that is a file name. Looked up, not imported: an engine may import torch."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    for key, package in NAMES.items():
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        name: str | None = attrgetter(key)(recipe)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        if name is not None:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            yield from _name(tuple(key.split(".")), package, name)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    for index, logger in enumerate(recipe.trainer.logger):
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield from _name(("trainer", "logger", index), LOGGERS, logger)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    for index, function in enumerate(recipe.reward.functions):
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        if function.path is None:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            at_function: Loc = ("reward", "functions", index, "name")
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            yield from _name(at_function, REWARDS, function.name)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    for index, judge in enumerate(recipe.reward.judges):
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        if judge.kind not in OTHER_PACKAGES:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            others = tuple(OTHER_PACKAGES)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            yield from _name(("reward", "judges", index, "kind"), JUDGES, judge.kind, others)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def _name(at: Loc, package: str, name: str, others: tuple[str, ...] = ()) -> Iterator[Problem]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if "." in name:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        if plugins.find(name) is None:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            hint = plugins.where_it_stands(name)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            yield at, f"{dotted(at)}: no module {name!r} can be imported{hint}"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        return
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    names = tuple(sorted((*plugins.known(package), *others)))
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if name not in names:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        near = difflib.get_close_matches(name, names, n=1)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        hint = f"; did you mean {near[0]!r}?" if near else ""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield at, f"{dotted(at)}: got {name!r}{hint} (known: {', '.join(names)}, or a dotted path)"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def names_at(key: str) -> tuple[str, ...]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    """The modules that may be named at a key of a recipe; empty where the key names none."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if key == "algorithm.name":
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        return tuple(homes())
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    package = {**NAMES, "trainer.logger": LOGGERS}.get(key)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    return tuple(sorted(plugins.known(package))) if package else ()
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def imported(tree: Mapping[str, Any]) -> list[str]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    """The dotted names in a recipe's sections that a check imports; it finds the others and reads their source."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    algorithm, actor, stages = (_section(tree, key) for key in ("algorithm", "actor", "stages"))
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    named = [algorithm.get("name"), *(_section(stages, name).get("kind") for name in stages)]
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    formulas = (algorithm.get("adv_estimator"), _section(actor, "policy_loss").get("loss_mode"))
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    dotted = [name for name in named if _is_dotted(name)]
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    for formula in formulas:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        if _is_dotted(formula) and (place := plugins.class_place("", formula, "Options")):
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            dotted.append(place[0])
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    return list(dict.fromkeys(dotted))
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def _section(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    section = tree.get(key)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    return section if isinstance(section, Mapping) else {}
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def _is_dotted(name: object) -> TypeGuard[str]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    return isinstance(name, str) and "." in name
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def _sizes(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    data, actor = recipe.data, recipe.actor
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    mini, batch = actor.ppo_mini_batch_size, data.train_batch_size
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if mini is not None and batch % mini:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            ("actor", "ppo_mini_batch_size"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f"actor.ppo_mini_batch_size: {mini} does not divide data.train_batch_size, {batch}",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    longest = data.max_prompt_length + data.max_response_length
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if actor.ppo_max_token_len_per_gpu < longest:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            ("actor", "ppo_max_token_len_per_gpu"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f"actor.ppo_max_token_len_per_gpu: {actor.ppo_max_token_len_per_gpu} is less than one row "
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f"may have, {longest} (data.max_prompt_length + data.max_response_length)",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if recipe.trainer.profile == "nsys" and not machine.gpus:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            ("trainer", "profile"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            "trainer.profile: nsys reads ranges on a GPU, and this machine has none; want torch or memory",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    config = machine.json(recipe.model.path / "config.json")
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    positions = config.get("max_position_embeddings")
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if isinstance(positions, int) and positions < longest:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            ("data", "max_response_length"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f"data.max_response_length: prompt and response may have {longest} tokens, "
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f"and the model in {recipe.model.path} takes {positions}",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def _models(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    """Whether the policy can be trained, and the models beside it that the algorithm trains or asks."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    needs = algorithm_needs(recipe)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    yield from check_trainable(("model", "path"), recipe.model.path, machine)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    for at, path, trained, column in (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        (("reference", "path"), recipe.reference.path, needs.reference, "`ref_logprobs`"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        (("critic", "path"), recipe.critic.path, needs.critic, "values"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    ):
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        if path is None:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            continue
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        if trained or (at[0] == "reference" and needs.implicit_reward):
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            yield from check_trainable(at, path, machine)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        if trained:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            for where, text in check_checkpoint(at, path, machine):
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
                yield where, f"{text} ({_asker(recipe)} needs {column})"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    yield from _vocabulary(recipe, machine)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def _vocabulary(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    """That the reference means the same by a token id as the policy: it is asked for the policy's tokens."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    path, own = recipe.reference.path, recipe.tokenizer_dir
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    at: Loc = ("reference", "path")
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    teaches = recipe.algorithm.distillation.weight > 0
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if teaches and path is None:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            at,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            "reference.path: missing: algorithm.distillation.weight wants a teacher, a checkpoint with"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            " the policy's vocabulary",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if path is None or path == own or not algorithm_needs(recipe).reference:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        return
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    theirs, ours = machine.vocabulary(path), machine.vocabulary(own)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if not theirs or not ours:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        bare = own if theirs else path
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        if teaches and machine.exists(bare) and "tokenizer.json" not in machine.names(bare):
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
                at,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
                f"reference.path: {bare} has no tokenizer.json, so nobody can tell whether teacher and policy"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
                " mean the same by a token; want the tokenizer beside the weights",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        return
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    different = sum(theirs.get(token) != number for token, number in ours.items())
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if different:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            at,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f"reference.path: {different} of the policy's {len(ours)} tokens have another id in {path}, or none:"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            " its log-probs would be those of other words; want a model with the policy's tokenizer",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def _asker(recipe: Recipe) -> str:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    """The key that makes the algorithm need a model beside the policy."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if recipe.algorithm.use_kl_in_reward:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        return "algorithm.use_kl_in_reward"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if recipe.algorithm.distillation.weight:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        return "algorithm.distillation.weight"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if recipe.actor.use_kl_loss:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        return "actor.use_kl_loss"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if algorithm_needs(recipe).critic:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        return f"algorithm.adv_estimator {recipe.algorithm.adv_estimator}"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    return f"actor.policy_loss.loss_mode {recipe.actor.policy_loss.loss_mode}"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def _routing_replay(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    key = "rollout.routing_replay"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if not recipe.rollout.routing_replay:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        return
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    config = machine.json(recipe.model.path / "config.json")
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    text = config.get("text_config") or config
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if config and not text.get("num_experts_per_tok"):
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            ("rollout", "routing_replay"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f"{key}: {recipe.model.path} has no experts; want false",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if recipe.model.use_torch_compile:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            ("model", "use_torch_compile"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f"model.use_torch_compile: routers of compiled layers are told nothing by {key}; want one of the two",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def _pictures(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    """Parts that read text only, of a recipe whose model reads pictures, and packages that it lacks."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if recipe.rollout.name not in PICTURE_ENGINES:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            ("rollout", "name"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f"rollout.name: {recipe.rollout.name} reads text only, and {recipe.model.path} reads pictures; want"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f" {' or '.join(PICTURE_ENGINES)}",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    program = recipe.rollout.program
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if program not in PICTURE_PROGRAMS and "." not in program:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            ("rollout", "program"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f"rollout.program: {program} loses the pictures of a prompt; want {', '.join(PICTURE_PROGRAMS)}",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if recipe.rollout.program_options.get("branch") == "each":
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            ("rollout", "program_options"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            "rollout.program_options.branch: each trains text only; want last, longest or only",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    yield from _read_alike(recipe, machine)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    for dimension in ("tensor", "expert"):
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        if getattr(recipe.parallel, dimension) > 1:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            key = f"trainer.parallel.{dimension}"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
                ("trainer", "parallel", dimension),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
                f"{key}: a model that reads pictures is not shared out so; want 1",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    for package, distribution in PICTURE_PACKAGES.items():
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        if not machine.installed(package):
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            yield ("model",), f"model: pictures need {distribution}: pip install 'meshrl[vision]'"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def _read_alike(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    """Whether the models beside the policy, where the recipe names some, make the same tokens of a picture."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    needs = algorithm_needs(recipe)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    judged = needs.reference or needs.implicit_reward
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if judged and recipe.reference.nproc > 1:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            ("reference", "nproc"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f"reference.nproc: {recipe.model.path} reads pictures, which a reference's ranks are not sent; want 1",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    reference = recipe.reference.path if judged else None
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    for at, path in (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        (("reference", "path"), reference),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        (("critic", "path"), recipe.critic.path if needs.critic else None),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    ):
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        if path is None:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            continue
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        theirs, ours = (_tokens_of_pictures(each, machine) for each in (path, recipe.model.path))
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        for name in ours:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            if theirs[name] != ours[name]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
                yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
                    at,
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
                    f"{'.'.join(at)}: {path} and model.path must make the same tokens of a picture, and {name} is"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
                    f" {theirs[name]} there, {ours[name]} here",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
                )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
                break
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def _tokens_of_pictures(path: Path, machine: ThisMachine) -> dict[str, Any]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    """What decides how many tokens a picture is, and which."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    config = machine.json(path / "config.json")
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    preprocessor = machine.json(path / "preprocessor_config.json")
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    keys = ("patch_size", "merge_size", "size", "min_pixels", "max_pixels")
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    return {
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        "image_token_id": config.get("image_token_id"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        **{name: preprocessor.get(name) for name in keys},
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    }
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def _served_adapters(recipe: Recipe) -> Iterator[Problem]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    """An engine that serves adapters gets adapters, and as large ones as it has room for."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    most, rank = recipe.rollout.engine.get("max_lora_rank"), recipe.model.lora_rank
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if not isinstance(most, int) or not most:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        return
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if not rank:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        says = "whole weights: want model.lora_rank, or no max_lora_rank"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    elif recipe.model.use_dora:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        says = "DoRA's merged weights, for engines serve plain LoRA: want no max_lora_rank, or model.use_dora=false"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    elif rank > most:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        says = f"adapters of rank {rank}: want at least that"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    else:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        return
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    at: Loc = ("rollout", "engine", "max_lora_rank")
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    yield at, f"rollout.engine.max_lora_rank: {most}, and the trainer sends {says}"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def _lent_memory(recipe: Recipe) -> Iterator[Problem]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    """A server has memory of its device for what NCCL brings alone."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    rollout, weights = recipe.rollout, recipe.weights
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    asked = rollout.engine.get("weight_staging") == "device"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if asked and rollout.name in ("vllm", "sglang") and "nccl" not in weights.choices:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            ("rollout", "engine", "weight_staging"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f"rollout.engine.weight_staging: device, and weights.carrier {weights.carrier} brings weights"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            " to the host: want nccl there, or auto or host here",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def _evaluated(recipe: Recipe) -> Iterator[Problem]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    """The isolation of a reward that evaluates what the policy wrote."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    gym = recipe.data.reasoning_gym
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if gym is None:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        return
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    evaluated = sorted(
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        gym.tasks.keys() & plugins.constant(REWARDS, "reasoning_gym", "EVALUATED", ())
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    scored = any(function.name == "reasoning_gym" for function in recipe.reward.functions)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if evaluated and scored and recipe.reward.recipe_sandbox is not Isolation.STRICT:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            ("reward", "recipe_sandbox"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f"reward.recipe_sandbox: want strict, since answers to {', '.join(evaluated)} are evaluated as Python",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def _algorithm(recipe: Recipe) -> Iterator[Problem]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    """What estimator, loss and sampling ask of each other."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    try:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        algorithm_rules.check(recipe.algorithm, recipe.actor)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    except ConfigError as error:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield tuple(error.details.get("key", "algorithm.adv_estimator").split(".")), str(error)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if algorithm_needs(recipe).greedy and recipe.queue.group_policy != "all":
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            ("queue", "group_policy"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f"queue.group_policy: {recipe.queue.group_policy} may leave out the greedy row that"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f" algorithm.adv_estimator {recipe.algorithm.adv_estimator} needs; want all",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if algorithm_needs(recipe).data_answers:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield from _own_answers(recipe)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if trains_each_branch(recipe):
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield from _each_branch(recipe)
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    judged = recipe.algorithm.filter_groups
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    low, high = judged.low, judged.high
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if judged.enable and low is not None and high is not None and low > high:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            ("algorithm", "filter_groups", "low"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f"algorithm.filter_groups.low: {low:g} is above high, {high:g}",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def _each_branch(recipe: Recipe) -> Iterator[Problem]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    """What reads a row as one sequence, and so cannot read one of several branches."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    needs, key = algorithm_needs(recipe), "rollout.program_options.branch"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    for wrong, what in (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        (needs.reference, "a reference (actor.use_kl_loss, algorithm.use_kl_in_reward, a teacher)"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        (needs.critic or needs.implicit_reward, "a model beside the policy"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        (needs.whole_groups, f"the loss {recipe.actor.policy_loss.loss_mode}"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        (recipe.algorithm.use_pf_ppo, "algorithm.use_pf_ppo"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        (recipe.reward.token_rewards, "reward.token_rewards"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    ):
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        if wrong:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
                ("rollout", "program_options"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
                f"{key}: each, and {what} reads a row as one sequence; want another branch, or none of it",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def _own_answers(recipe: Recipe) -> Iterator[Problem]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    """What pairs of the data's answers with the policy's want beside the algorithm."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    asks = f"algorithm.adv_estimator {recipe.algorithm.adv_estimator}"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if recipe.rollout.n != 1:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            ("rollout", "n"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f"rollout.n: {recipe.rollout.n}: {asks} pairs one answer of the policy with the data's; want 1",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if recipe.data.reasoning_gym is not None:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            ("data", "reasoning_gym"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f"data.reasoning_gym: its tasks have no text that {asks} could learn from; want data.train_files",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if recipe.rollout.program != "single_turn":
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            ("rollout", "program"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f"rollout.program: the data's answer is one turn, as {asks} needs it; want single_turn",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES

from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
def _packages(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    """Packages and GPUs that the trainer lacks."""
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    modules = ["torch", "transformers"]
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if recipe.model.lora_rank:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        modules.append("peft")
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    for module in modules:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        if not machine.installed(module):
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            yield ("model",), f"model: this needs {module}: pip install 'meshrl[torch]'"
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    trainer = recipe.trainer
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    if trainer.device == "cuda" and trainer.nproc > machine.gpus:
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        has = f"{machine.gpus} GPUs" if machine.gpus else machine.no_gpu
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            ("trainer", "device"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            f"trainer.device: cuda, {trainer.nproc} ranks (trainer.nproc), and this machine has {has}",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        )
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
    for name in sorted({*trainer.logger} - {"console"}):
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        # A logger's module is named as its package; one with a dotted path says itself what it lacks.
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
        if "." not in name and name in plugins.known(LOGGERS) and not machine.installed(name):
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            extra = "logging" if name in ("tensorboard", "wandb") else name
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            yield (
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
                ("trainer", "logger"),
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
                f"trainer.logger: {name} is not installed; pip install 'meshrl[{extra}]'",
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
            )
