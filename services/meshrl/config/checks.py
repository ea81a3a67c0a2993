"""Every check of a recipe, section by section, and what only several sections together can tell.

Checks of one section are beside it: `checks.py` of trainer and rewardd, `check_rollout`, `check_stages`, and
`check` in the configurations of queue and weights. Each check yields the key to change and one sentence. None runs a
user's file; transformers makes a tokenizer, with torch, where it must, and a verifiers environment is loaded by
its own Python.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, TypeGuard

from meshrl.common import plugins
from meshrl.common.chat_templates import drops_thoughts, rendered
from meshrl.common.checks import Loc, Problem, dotted
from meshrl.config.device_defaults import hints
from meshrl.config.machine import ThisMachine
from meshrl.config.picture_checks import PICTURE_ENGINES, check_pictures
from meshrl.config.placement import place
from meshrl.config.recipe import (
    Recipe,
    algorithm_needs,
    posts_rewards,
    session_options,
    trains_each_branch,
    uses_gateway,
)
from meshrl.config.stages import check_stages, vocabulary
from meshrl.config.weights import CARRIERS, LIBRARIES
from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.held_rows import RENEWALS
from meshrl.rewardd.checks import check_reward, unscored
from meshrl.rewardd.config import JUDGES, OTHER_PACKAGES
from meshrl.rewardd.pool.rule import REWARDS
from meshrl.rollout.config import ENGINES, PROGRAMS, check_rollout, row_fault
from meshrl.rollout.tools.ports import FORMATS, ToolsConfig
from meshrl.sandbox.sandbox import Isolation
from meshrl.trainer.algorithms import needs as algorithm_rules
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES
from meshrl.trainer.algorithms.recipe_defaults import homes
from meshrl.trainer.checks import (
    DataUse,
    check_after_checkpoint,
    check_checkpoint,
    check_data,
    check_experts,
    check_model,
    check_parallel,
    check_trainable,
)
from meshrl.trainer.data.files import READERS
from meshrl.trainer.data.prompts import PromptTokenizer
from meshrl.transferqueue.config import STORES

LOGGERS = "meshrl.trainer.loggers"
NAMES: Mapping[str, str] = {
    "rollout.name": ENGINES,
    "rollout.program": PROGRAMS,
    "queue.store": STORES,
    "queue.sampler": "meshrl.transferqueue.samplers",
    "weights.carrier": CARRIERS,
    "weights.nccl.library": LIBRARIES["nccl"],
    "weights.ipc.library": LIBRARIES["cuda_ipc"],
    "algorithm.adv_estimator": ADVANTAGES,
    "actor.policy_loss.loss_mode": LOSSES,
    "data.reader": READERS,
    "data.curriculum": "meshrl.trainer.data.curricula",
}
"""Key to the package whose modules may be named there; another module by its dotted path."""
MANY_RENEWALS, CALM_RENEWALS = 300, 100
"""Calls a second of a queue process above which there is a warning, and what it asks for (docs/how-to/scale.md)."""


def cross_checks(
    recipe: Recipe, machine: ThisMachine | None = None, sections: Collection[str] | None = None
) -> Iterator[Problem]:
    """Every problem of these sections, None: of all; `machine` is the one that will run the recipe, or this one."""
    for at, sentence in _every(recipe, machine or ThisMachine(), sections):
        if sections is None or at[0] in sections:
            yield at, sentence


def _every(
    recipe: Recipe, machine: ThisMachine, sections: Collection[str] | None
) -> Iterator[Problem]:
    """Problems of the sections, and of others. Rows are tokenised where all sections are asked for."""
    config = machine.json(recipe.model.path / "config.json")
    pictures = "vision_config" in config
    tokenizer, of_model = None, list(check_model(recipe.model, machine))
    if sections is None and not of_model:
        try:
            tokenizer = machine.tokenizer(recipe.tokenizer_dir)
        except UserError as error:
            key = "tokenizer_path" if recipe.model.tokenizer_path else "path"
            of_model = [(("model", key), f"model.{key}: {error}")]
    known = vocabulary(recipe, machine)
    if tokenizer is not None and 0 < known < tokenizer.vocab_size:
        of_model.append((("model", "path"), f"model.path: {_too_many(recipe, tokenizer, known)}"))
    data_use = DataUse(
        tokenizer=tokenizer,
        vocabulary=known,
        # Where nothing is known of the model, a column of pictures is no fault.
        pictures=(pictures and recipe.rollout.name in PICTURE_ENGINES) or not config,
        own_answers=algorithm_needs(recipe).data_answers,
        unusable=partial(unusable, recipe),
        test_freq=recipe.trainer.test_freq,
    )
    right = True
    for problem in chain(
        _one_rank(recipe),
        _names(recipe),
        of_model,
        check_data(recipe.data, data_use, machine),
        check_parallel(recipe.trainer, recipe.model, machine),
        check_after_checkpoint(recipe.trainer),
        check_experts(recipe.actor, recipe.model, machine),
        check_rollout(recipe.rollout, machine, recipe.model.path, tries=sections is None),
        check_reward(recipe.reward, machine, recipe.model.path),
        recipe.queue.check(machine, samples=recipe.rollout.n),
        recipe.weights.check(machine),
        check_stages(recipe),
        _sizes(recipe, machine),
        _models(recipe, machine),
        _routing_replay(recipe, machine),
        _sampling(recipe, machine),
        check_pictures(recipe, machine) if pictures else (),
        _served_adapters(recipe),
        _lent_memory(recipe),
        _evaluated(recipe),
        _algorithm(recipe),
        _packages(recipe, machine),
    ):
        right = False
        yield problem
    # What has another fault may be placed differently once that is mended.
    if right:
        try:
            problems = list(place(recipe, machine).problems())
        except ConfigError as error:
            problems = [str(error)]
        # No service has the section: the others may be elsewhere.
        yield from ((("placement",), problem) for problem in problems)


def _too_many(recipe: Recipe, tokenizer: PromptTokenizer, known: int) -> str:
    return (
        f"the tokenizer in {recipe.tokenizer_dir} has {len(tokenizer)} tokens, and the model knows {known}"
        " (vocab_size of config.json): rows with the others cannot be trained; want the model's own tokenizer"
    )


def unusable(recipe: Recipe, data_source: str, extra_info: Mapping[str, Any]) -> str:
    """The reason why such a row names no task or gets no score; empty where it does, or the program may post one."""
    if why := row_fault(recipe.rollout.program, extra_info):
        return why
    return "" if posts_rewards(recipe) else unscored(recipe.reward, data_source)


def warnings(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    """Recipes that would start, and are hardly meant so: the key and one sentence."""
    rollout = recipe.rollout
    greedy = rollout.temperature == 0 or rollout.top_k == 1
    why = algorithm_rules.cannot_learn(
        recipe.algorithm, recipe.actor, rows=rollout.n, greedy=greedy
    )
    if why:
        key = "n" if rollout.n == 1 else "temperature"
        yield ("rollout", key), f"rollout.{key}: {why}"
    tokenizer, known = machine.tokenizer(recipe.tokenizer_dir), vocabulary(recipe, machine)
    if tokenizer is not None and 0 < known < len(tokenizer):
        yield ("model", "path"), f"model.path: {_too_many(recipe, tokenizer, known)}"
    if tokenizer is not None:
        yield from _template(recipe, tokenizer)
    trained = {"actor": recipe.actor.optim}
    if algorithm_needs(recipe).critic:
        trained["critic"] = recipe.critic.optim
    for section, optim in trained.items():
        for key, oddity in optim.oddities(recipe.trainer.total_training_steps):
            yield (section, "optim", key), f"{section}.optim.{key}: {oddity}"
    yield from ((("rollout", "name"), hint) for hint in hints(recipe, machine))
    workers, queue = recipe.rollout.workers, recipe.queue
    renewals = workers * RENEWALS / queue.lease_ttl_s
    if renewals > MANY_RENEWALS:
        calm = math.ceil(queue.lease_ttl_s * renewals / CALM_RENEWALS)
        yield (
            ("queue", "lease_ttl_s"),
            f"queue.lease_ttl_s: {workers} workers would renew their leases {renewals:.0f} times a second at the"
            f" queue, which answers some 700 calls; want {calm}",
        )


def _template(recipe: Recipe, tokenizer: PromptTokenizer) -> Iterator[Problem]:
    """Programs that speak in messages: without a chat template, or with one that shows another history."""
    if not tokenizer.chat_template and (lost := _lost_messages(recipe)):
        yield (
            ("rollout", "program"),
            f"rollout.program: the tokenizer has no chat template, so {lost}; want a checkpoint that has one",
        )
    settings = {**recipe.data.apply_chat_template_kwargs, "add_generation_prompt": False}
    if tokenizer.chat_template and (role := _role_of_results(recipe)):
        asked = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]
        try:
            rendered(tokenizer, [*asked, {"role": role, "content": "."}], **settings)
        except UserError as error:
            key = "rollout.program_options.role"
            yield ("rollout", "program_options"), f"{key}: {error}; want role: user"
    if not uses_gateway(recipe) or trains_each_branch(recipe):
        return
    roles = drops_thoughts(lambda messages: rendered(tokenizer, messages, **settings))
    if roles:
        before = " and ".join(sorted(roles, reverse=True))
        yield (
            ("rollout", "program_options"),
            "rollout.program_options: the chat template leaves the thoughts of earlier turns out before a"
            f" message of {before}, and rows keep them; branch: each (verifiers have it under session) trains"
            " each turn behind what it is shown",
        )


def _lost_messages(recipe: Recipe) -> str:
    """The messages of the program that need a chat template; empty where it has none, or they are its function's."""
    program = recipe.rollout.program
    if uses_gateway(recipe):
        return "all that agents ask in messages is refused"
    if plugins.constant(PROGRAMS, program, "TRAINS_SEATS", False):
        return "no seat of the policy can be told anything"
    return "the policy cannot be shown what a tool returns" if _role_of_results(recipe) else ""


def _role_of_results(recipe: Recipe) -> str:
    """The role of the messages in which the program shows what tools return; empty where it shows none."""
    program, options = recipe.rollout.program, recipe.rollout.program_options
    if not plugins.constant(PROGRAMS, program, "CALLS_TOOLS", False):
        return ""
    defaults = ToolsConfig.model_fields
    calls = str(options.get("format", defaults["format"].default))
    as_text = plugins.constant(FORMATS, calls, "OBSERVATION", "")
    return "" if as_text else str(options.get("role", defaults["role"].default))


def _one_rank(recipe: Recipe) -> Iterator[Problem]:
    """Several ranks of a server of callers' models."""
    if recipe.tinker is not None and recipe.trainer.ranks > 1:
        yield (
            ("tinker",),
            f"tinker: trainer.nproc and nnodes make {recipe.trainer.ranks} ranks, and models of callers are"
            " trained by one so far; want 1",
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


def _name(at: Loc, package: str, name: str, others: tuple[str, ...] = ()) -> Iterator[Problem]:
    if "." in name:
        if plugins.find(name) is None:
            hint = plugins.where_it_stands(name)
            yield at, f"{dotted(at)}: no module {name!r} can be imported{hint}"
        return
    names = tuple(sorted((*plugins.known(package), *others)))
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        yield at, f"{dotted(at)}: got {name!r}{hint} (known: {', '.join(names)}, or a dotted path)"


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


def _sizes(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    data, actor = recipe.data, recipe.actor
    mini, batch = actor.ppo_mini_batch_size, data.train_batch_size
    if mini is not None and batch % mini:
        yield (
            ("actor", "ppo_mini_batch_size"),
            f"actor.ppo_mini_batch_size: {mini} does not divide data.train_batch_size, {batch}",
        )
    longest = data.max_prompt_length + data.max_response_length
    if actor.ppo_max_token_len_per_gpu < longest:
        yield (
            ("actor", "ppo_max_token_len_per_gpu"),
            f"actor.ppo_max_token_len_per_gpu: {actor.ppo_max_token_len_per_gpu} is less than one row "
            f"may have, {longest} (data.max_prompt_length + data.max_response_length)",
        )
    if recipe.trainer.profile == "nsys" and not machine.gpus:
        yield (
            ("trainer", "profile"),
            "trainer.profile: nsys reads ranges on a GPU, and this machine has none; want torch or memory",
        )
    config = machine.json(recipe.model.path / "config.json")
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and positions < longest:
        yield (
            ("data", "max_response_length"),
            f"data.max_response_length: prompt and response may have {longest} tokens, "
            f"and the model in {recipe.model.path} takes {positions}",
        )


def _models(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    """Whether the policy can be trained, and the models beside it that the algorithm trains or asks."""
    needs = algorithm_needs(recipe)
    yield from check_trainable(("model", "path"), recipe.model.path, machine)
    for at, path, trained, column in (
        (("reference", "path"), recipe.reference.path, needs.reference, "`ref_logprobs`"),
        (("critic", "path"), recipe.critic.path, needs.critic, "values"),
    ):
        if path is None:
            continue
        if trained or (at[0] == "reference" and needs.implicit_reward):
            yield from check_trainable(at, path, machine)
        if trained:
            for where, text in check_checkpoint(at, path, machine):
                yield where, f"{text} ({_asker(recipe)} needs {column})"
    yield from _vocabulary(recipe, machine)


def _vocabulary(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    """Check that policy and reference share a vocabulary: the reference scores the policy's token ids."""
    path, own = recipe.reference.path, recipe.tokenizer_dir
    at: Loc = ("reference", "path")
    teaches = recipe.algorithm.distillation.weight > 0
    if teaches and path is None:
        yield (
            at,
            "reference.path: missing: algorithm.distillation.weight wants a teacher, a checkpoint with"
            " the policy's vocabulary",
        )
    if path is None or path == own or not algorithm_needs(recipe).reference:
        return
    theirs, ours = machine.vocabulary(path), machine.vocabulary(own)
    if not theirs or not ours:
        bare = own if theirs else path
        if teaches and machine.exists(bare) and "tokenizer.json" not in machine.names(bare):
            yield (
                at,
                f"reference.path: {bare} has no tokenizer.json, so it is unknown whether teacher and policy"
                " mean the same by a token; want the tokenizer beside the weights",
            )
        return
    different = sum(theirs.get(token) != number for token, number in ours.items())
    if different:
        yield (
            at,
            f"reference.path: {different} of the policy's {len(ours)} tokens have another id in {path}, or none:"
            " its log-probs would be those of other words; want a model with the policy's tokenizer",
        )


def _asker(recipe: Recipe) -> str:
    """The key that makes the algorithm need a model beside the policy."""
    if recipe.algorithm.use_kl_in_reward:
        return "algorithm.use_kl_in_reward"
    if recipe.algorithm.distillation.weight:
        return "algorithm.distillation.weight"
    if recipe.actor.use_kl_loss:
        return "actor.use_kl_loss"
    if algorithm_needs(recipe).critic:
        return f"algorithm.adv_estimator {recipe.algorithm.adv_estimator}"
    return f"actor.policy_loss.loss_mode {recipe.actor.policy_loss.loss_mode}"


def _routing_replay(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    key = "rollout.routing_replay"
    if not recipe.rollout.routing_replay:
        return
    config = machine.json(recipe.model.path / "config.json")
    text = config.get("text_config") or config
    if config and not text.get("num_experts_per_tok"):
        yield (
            ("rollout", "routing_replay"),
            f"{key}: {recipe.model.path} has no experts; want false",
        )
    if recipe.model.use_torch_compile:
        yield (
            ("model", "use_torch_compile"),
            f"model.use_torch_compile: routers of compiled layers ignore {key}; want one of the two",
        )
    if recipe.rollout.engine.get("speculative") is not None:
        yield (
            ("rollout", "engine", "speculative"),
            f"rollout.engine.speculative: {key} wants the experts of tokens, not of guesses; want one of the two",
        )


def _served_adapters(recipe: Recipe) -> Iterator[Problem]:
    """An engine that serves adapters gets adapters, and as large ones as it has room for."""
    most, rank = recipe.rollout.engine.get("max_lora_rank"), recipe.model.lora_rank
    if not isinstance(most, int) or not most or recipe.tinker is not None:
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


def _evaluated(recipe: Recipe) -> Iterator[Problem]:
    """Check that tasks of reasoning-gym are scored, and how a reward that evaluates responses is isolated."""
    gym = recipe.data.reasoning_gym
    if gym is None:
        return
    unscored_tasks = (why for task in gym.tasks if (why := unscored(recipe.reward, task)))
    if (why := next(unscored_tasks, "")) and not posts_rewards(recipe):
        yield (
            ("data", "reasoning_gym"),
            f"data.reasoning_gym: {why}; of its tasks reward.functions=[{{name: reasoning_gym}}] does",
        )
    evaluated = sorted(
        gym.tasks.keys() & plugins.constant(REWARDS, "reasoning_gym", "EVALUATED", ())
    )
    scored = any(function.name == "reasoning_gym" for function in recipe.reward.functions)
    if evaluated and scored and recipe.reward.recipe_sandbox is not Isolation.STRICT:
        yield (
            ("reward", "recipe_sandbox"),
            f"reward.recipe_sandbox: want strict, since answers to {', '.join(evaluated)} are evaluated as Python",
        )


def _algorithm(recipe: Recipe) -> Iterator[Problem]:
    """Conditions of estimator, loss and sampling on each other."""
    try:
        algorithm_rules.check(recipe.algorithm, recipe.actor)
    except ConfigError as error:
        yield tuple(error.details.get("key", "algorithm.adv_estimator").split(".")), str(error)
    if algorithm_needs(recipe).greedy and recipe.queue.group_policy != "all":
        yield (
            ("queue", "group_policy"),
            f"queue.group_policy: {recipe.queue.group_policy} may leave out the greedy row that"
            f" algorithm.adv_estimator {recipe.algorithm.adv_estimator} needs; want all",
        )
    if algorithm_needs(recipe).data_answers:
        yield from _own_answers(recipe)
    if trains_each_branch(recipe):
        yield from _each_branch(recipe)
    judged = recipe.algorithm.filter_groups
    low, high = judged.low, judged.high
    if judged.enable and low is not None and high is not None and low > high:
        yield (
            ("algorithm", "filter_groups", "low"),
            f"algorithm.filter_groups.low: {low:g} is above high, {high:g}",
        )


def _sampling(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    """Training rows of another distribution than the trainer computes, uncorrected; tokens that the model lacks."""
    rollout, known = recipe.rollout, vocabulary(recipe, machine)
    for at, distribution in (
        (("rollout",), rollout),
        (("rollout", "val_kwargs"), rollout.val_kwargs),
    ):
        if 0 < known <= (foreign := max(distribution.logit_bias, default=0)):
            yield (
                (*at, "logit_bias"),
                f"{dotted(at)}.logit_bias: token {foreign}, and the model knows 0 to {known - 1}",
            )
    if _takes_any_distribution(recipe):
        return
    for key, off in (("min_p", 0.0), ("repetition_penalty", 1.0), ("logit_bias", {})):
        if (value := getattr(rollout, key)) != off:
            yield (
                ("rollout", key),
                f"rollout.{key}: {value}, and the loss would take the trainer's log-probs, which are of the"
                f" distribution without it, for those that were sampled with; want {off}, or"
                " algorithm.rollout_correction.rollout_is: token",
            )
    if uses_gateway(recipe) and session_options(recipe).get("client_sampling"):
        yield (
            ("rollout", "program_options", "client_sampling"),
            "rollout.program_options.client_sampling: clients choose other distributions than the trainer's, and"
            " nothing corrects it; want false, or algorithm.rollout_correction.rollout_is: token",
        )


def _takes_any_distribution(recipe: Recipe) -> bool:
    """Whether the loss divides by, or weighs with, the log-probs that tokens were sampled with."""
    algorithm, on_policy = recipe.algorithm, recipe.queue.max_staleness == 0
    try:
        old = algorithm_rules.rollout_is_old(algorithm, recipe.actor, on_policy=on_policy)
    except ConfigError:
        return True  # told as a problem of the correction
    weighs = algorithm.rollout_correction.rollout_is is not None
    return old or weighs or algorithm_needs(recipe).data_answers


def _each_branch(recipe: Recipe) -> Iterator[Problem]:
    """Parts that read a row as one sequence, and so cannot read one of several branches."""
    needs, name = algorithm_needs(recipe), recipe.algorithm.adv_estimator
    seats = session_options(recipe).get("branch") != "each"
    key = "rollout.program: seats" if seats else "rollout.program_options.branch: each"
    for wrong, what in (
        (seats and needs.greedy, f"algorithm.adv_estimator {name}"),
        (needs.implicit_reward, "the reward model of algorithm.prime"),
        (needs.whole_groups, f"the loss {recipe.actor.policy_loss.loss_mode}"),
        (recipe.algorithm.use_pf_ppo, "algorithm.use_pf_ppo"),
        (recipe.reward.token_rewards, "reward.token_rewards"),
    ):
        if wrong:
            yield (
                ("rollout", "program" if seats else "program_options"),
                f"{key}, and {what} reads a row as one sequence; want another, or none of it",
            )


def _own_answers(recipe: Recipe) -> Iterator[Problem]:
    """Conditions for pairs of the data's answers with the policy's."""
    asks = f"algorithm.adv_estimator {recipe.algorithm.adv_estimator}"
    if recipe.rollout.n != 1:
        yield (
            ("rollout", "n"),
            f"rollout.n: {recipe.rollout.n}: {asks} pairs one answer of the policy with the data's; want 1",
        )
    if recipe.data.reasoning_gym is not None:
        yield (
            ("data", "reasoning_gym"),
            f"data.reasoning_gym: its tasks have no text that {asks} could learn from; want data.train_files",
        )
    if recipe.rollout.program != "single_turn":
        yield (
            ("rollout", "program"),
            f"rollout.program: the data's answer is one turn, as {asks} needs it; want single_turn",
        )


def _packages(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    """Packages and GPUs that the trainer lacks."""
    modules = ["torch", "transformers"]
    if recipe.model.lora_rank:
        modules.append("peft")
    if lacking := [module for module in modules if not machine.installed(module)]:
        yield ("model",), f"model: this needs {', '.join(lacking)}: pip install 'meshrl[torch]'"
    trainer = recipe.trainer
    if trainer.device == "cuda" and trainer.nproc > machine.gpus:
        has = f"{machine.gpus} GPUs" if machine.gpus else machine.no_gpu
        yield (
            ("trainer", "device"),
            f"trainer.device: cuda, {trainer.nproc} ranks (trainer.nproc), and this machine has {has}",
        )
    for name in sorted({*trainer.logger} - {"console"}):
        # A logger's module is named as its package; one with a dotted path says itself what it lacks.
        if "." not in name and name in plugins.known(LOGGERS) and not machine.installed(name):
            extra = "logging" if name in ("tensorboard", "wandb") else name
            yield (
                ("trainer", "logger"),
                f"trainer.logger: {name} is not installed; pip install 'meshrl[{extra}]'",
            )
