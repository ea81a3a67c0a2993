"""What only the whole recipe, or the machine it runs on, can tell: sizes that must fit, names, files, options.

Each check yields the key to change and one sentence. None imports torch, runs a user's file or starts anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from meshrl.common import plugins
from meshrl.config import stages
from meshrl.config.device_defaults import hints
from meshrl.config.explain import Loc
from meshrl.config.file_checks import Problem, checkpoint_checks, file_checks, model_checks
from meshrl.config.machine import ThisMachine
from meshrl.config.placement import place
from meshrl.config.plugin_checks import LOGGERS, plugin_checks
from meshrl.config.recipe import Recipe, algorithm_needs, trains_each_branch
from meshrl.contract.errors import ConfigError
from meshrl.contract.held_rows import RENEWALS
from meshrl.trainer.algorithms import needs as algorithm_rules
from meshrl.trainer.model.untrainable import WANTED, refusal

PICTURE_ENGINES = ("vllm", "sglang")
PICTURE_PROGRAMS = ("single_turn", "tools", "user", "openai")
"""Built-in programs that hand a task's pictures to the engine."""
MANY_RENEWALS, CALM_RENEWALS = 300, 100
"""Calls a second of a queue process above which there is a warning, and what it asks for (docs/how-to/scale.md)."""
ROUTER_BIAS = "e_score_correction_bias"
"""What a router adds to its scores to choose experts, in transformers' models."""
PICTURE_PACKAGES = {"PIL": "pillow", "msgpack": "msgpack"}


def cross_checks(recipe: Recipe, machine: ThisMachine | None = None) -> Iterator[Problem]:
    """Every problem, in the order of the sections; `machine` is the one that will run the recipe, or this one."""
    machine = machine or ThisMachine()
    right = True
    for problem in chain(
        model_checks(recipe, machine),
        file_checks(recipe, machine),
        _sizes(recipe, machine),
        _trainable(recipe, machine),
        _parallel(recipe, machine),
        _routing_replay(recipe, machine),
        _pictures(recipe, machine),
        plugin_checks(recipe, machine),
        _algorithm(recipe),
        _providers(recipe, machine),
        _stages(recipe),
    ):
        right = False
        yield problem
    # What has another fault may be placed differently once that is mended.
    yield from _placement(recipe, machine) if right else ()


def warnings(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    """What would start, and hardly be meant: the key and one sentence."""
    rows = recipe.rollout.n
    if why := algorithm_rules.cannot_learn(recipe.algorithm, recipe.actor, rows=rows):
        yield ("rollout", "n"), f"rollout.n: {why}"
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


def _stages(recipe: Recipe) -> Iterator[Problem]:
    """The recipe's own stages: their modules, names and options, and that each reads what an earlier one writes."""
    broken = False
    for name, stage in recipe.stages.items():
        at: Loc = ("stages", name)
        if name in stages.BUILT_IN:
            yield at, f"stages.{name}: {name} is a service of every mesh; want another name"
            broken = True
            continue
        try:
            kind = stages.options_class(stage.kind)
            stages.service_kind(recipe, name)
        except ConfigError as error:
            yield (*at, "kind"), f"stages.{name}.kind: {error}"
            broken = True
            continue
        if kind is None and stage.options:
            yield (*at, "options"), f"stages.{name}.options: {stage.kind} takes none"
        elif kind is not None:
            try:
                stages.stage_options(recipe, name, kind)
            except ConfigError as error:
                yield (*at, "options"), str(error)
    if recipe.stages and not broken:
        yield from _columns(recipe)


def _columns(recipe: Recipe) -> Iterator[Problem]:
    try:
        specs = stages.stage_specs(recipe)
    except ConfigError as error:
        yield ("stages",), str(error)
        return
    writers: dict[str, str] = {}
    for spec in specs:
        at: Loc = ("stages", spec.name)
        for column in spec.reads:
            if column not in writers:
                has = ", ".join(writers)
                yield (
                    at,
                    f"stages.{spec.name}: no earlier stage writes {column!r}; they write {has}",
                )
        for column in spec.writes:
            if column in writers:
                yield at, f"stages.{spec.name}: {writers[column]} writes {column!r} already"
        writers |= dict.fromkeys(spec.writes, spec.name)


def _placement(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    """Whether all services find room on the GPUs. No service has the section: the others may be elsewhere."""
    try:
        problems = list(place(recipe, machine).problems())
    except ConfigError as error:
        problems = [str(error)]
    yield from ((("placement",), problem) for problem in problems)


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
            f"model.use_torch_compile: routers of compiled layers are told nothing by {key}; want one of the two",
        )


def _trainable(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    """What packed training cannot do: of the policy, and of models beside it that are trained or asked."""
    needs = algorithm_needs(recipe)
    for at, path, wanted in (
        (("model", "path"), recipe.model.path, True),
        (("reference", "path"), recipe.reference.path, needs.reference or needs.implicit_reward),
        (("critic", "path"), recipe.critic.path, needs.critic),
    ):
        if path is None or not wanted:
            continue
        config = machine.json(path / "config.json")
        if why := refusal(config):
            yield at, f"{'.'.join(at)}: {path} is not supported: {why}; {WANTED}"
        elif at[0] == "model" and "lm_head.bias" in (machine.tensors(path) or ()):
            yield (
                at,
                f"model.path: the output embedding of {path} has a bias, which is not supported; want another model",
            )


def _parallel(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    """Whether ranks, heads and experts can be shared out as `trainer.parallel` says."""
    key, at = "trainer.parallel", ("trainer", "parallel")
    parallel = recipe.parallel
    for name, fault in parallel.faults(recipe.trainer.ranks, _ranks(recipe)):
        yield (*at, name), fault
        return
    config = machine.json(recipe.model.path / "config.json")
    heads, sharers = config.get("num_attention_heads"), parallel.tensor * parallel.sequence
    if isinstance(heads, int) and heads % sharers:
        yield (
            at,
            f"{key}: sequence x tensor, {sharers}, does not divide the model's {heads} attention heads",
        )
    if parallel.tensor > 1:
        yield from _tensor(recipe, config)
    named = (config.get(f"{kind}_experts") for kind in ("num", "num_local", "n_routed"))
    experts = next((number for number in named if isinstance(number, int)), None)
    if parallel.expert > 1 and config and experts is None:
        yield (*at, "expert"), f"{key}.expert: {recipe.model.path} has no experts; want 1"
    yield from _balance(recipe, machine, config)
    which = "expert" if parallel.expert > 1 else "tensor"
    if experts is not None and experts % max(parallel.expert, parallel.tensor):
        yield (
            (*at, which),
            f"{key}.{which}: {getattr(parallel, which)} does not divide the {experts} experts of {recipe.model.path}",
        )
    if recipe.model.lora_rank and parallel.tensor > 1:
        yield (*at, "tensor"), f"{key}.tensor: adapters are not shared among ranks; want 1"
    if recipe.model.use_torch_compile and (parallel.expert > 1 or parallel.tensor > 1):
        yield (
            ("model", "use_torch_compile"),
            f"model.use_torch_compile: layers are not compiled with {key}.{which}; want false, or 1 there",
        )


def _tensor(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Whether tensor ranks can share what the model has of a kind. Latent attention has no key heads to share."""
    size, mixture = recipe.parallel.tensor, config.get("num_experts_per_tok")
    for name, what, there in (
        ("num_key_value_heads", "key heads", not config.get("kv_lora_rank")),
        ("intermediate_size", "intermediate_size", not mixture),
    ):
        number = config.get(name)
        if there and isinstance(number, int) and number % size:
            yield (
                ("trainer", "parallel", "tensor"),
                f"trainer.parallel.tensor: {size} does not divide the {number} {what} of {recipe.model.path}; want"
                f" {_divisors(number, size)}",
            )
            return


def _divisors(number: int, below: int) -> str:
    """The divisors of a number that are below another one, for a message."""
    return " or ".join(str(each) for each in range(1, below) if number % each == 0)


def _ranks(recipe: Recipe) -> str:
    trainer = recipe.trainer
    machines = f" * trainer.nnodes, {trainer.ranks}" if trainer.nnodes > 1 else f", {trainer.nproc}"
    return f"trainer.nproc{machines}"


def _balance(recipe: Recipe, machine: ThisMachine, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Whether a mixture's experts can be kept busy as `actor` says."""
    for name in ("router_aux_loss_coef", "moe_router_bias_update_rate"):
        if not getattr(recipe.actor, name):
            continue
        key = f"actor.{name}"
        if config and not config.get("num_experts_per_tok"):
            yield ("actor", name), f"{key}: {recipe.model.path} has no experts; want 0"
        if recipe.model.use_torch_compile:
            yield (
                ("actor", name),
                f"{key}: compiled layers hide what is chosen; want 0, or no model.use_torch_compile",
            )
    if recipe.actor.moe_router_bias_update_rate and recipe.model.lora_rank:
        yield (
            ("actor", "moe_router_bias_update_rate"),
            "actor.moe_router_bias_update_rate: an adapter holds no biases; want 0",
        )
    tensors = machine.tensors(recipe.model.path)
    if (
        recipe.actor.moe_router_bias_update_rate
        and config.get("num_experts_per_tok")
        and tensors is not None
        and not any(name.endswith(ROUTER_BIAS) for name in tensors)
    ):
        yield (
            ("actor", "moe_router_bias_update_rate"),
            f"actor.moe_router_bias_update_rate: the routers of {recipe.model.path} have no {ROUTER_BIAS}; want 0, or"
            " router_aux_loss_coef",
        )


def _pictures(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    """Parts that read text only, of a recipe whose model reads pictures, and packages that it lacks."""
    if "vision_config" not in machine.json(recipe.model.path / "config.json"):
        return
    if recipe.rollout.name not in PICTURE_ENGINES:
        yield (
            ("rollout", "name"),
            f"rollout.name: {recipe.rollout.name} reads text only, and {recipe.model.path} reads pictures; want"
            f" {' or '.join(PICTURE_ENGINES)}",
        )
    program = recipe.rollout.program
    if program not in PICTURE_PROGRAMS and "." not in program:
        yield (
            ("rollout", "program"),
            f"rollout.program: {program} loses the pictures of a prompt; want {', '.join(PICTURE_PROGRAMS)}",
        )
    if recipe.rollout.program_options.get("branch") == "each":
        yield (
            ("rollout", "program_options"),
            "rollout.program_options.branch: each trains text only; want last, longest or only",
        )
    yield from _read_alike(recipe, machine)
    for dimension in ("tensor", "expert"):
        if getattr(recipe.parallel, dimension) > 1:
            key = f"trainer.parallel.{dimension}"
            yield (
                ("trainer", "parallel", dimension),
                f"{key}: a model that reads pictures is not shared out so; want 1",
            )
    for package, distribution in PICTURE_PACKAGES.items():
        if not machine.installed(package):
            yield ("model",), f"model: pictures need {distribution}: pip install 'meshrl[vision]'"


def _read_alike(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    """Whether the models beside the policy, where the recipe names some, make the same tokens of a picture."""
    needs = algorithm_needs(recipe)
    judged = needs.reference or needs.implicit_reward
    if judged and recipe.reference.nproc > 1:
        yield (
            ("reference", "nproc"),
            f"reference.nproc: {recipe.model.path} reads pictures, which a reference's ranks are not sent; want 1",
        )
    reference = recipe.reference.path if judged else None
    for at, path in (
        (("reference", "path"), reference),
        (("critic", "path"), recipe.critic.path if needs.critic else None),
    ):
        if path is None:
            continue
        theirs, ours = (_tokens_of_pictures(each, machine) for each in (path, recipe.model.path))
        for name in ours:
            if theirs[name] != ours[name]:
                yield (
                    at,
                    f"{'.'.join(at)}: {path} and model.path must make the same tokens of a picture, and {name} is"
                    f" {theirs[name]} there, {ours[name]} here",
                )
                break


def _tokens_of_pictures(path: Path, machine: ThisMachine) -> dict[str, Any]:
    """What decides how many tokens a picture is, and which."""
    config = machine.json(path / "config.json")
    preprocessor = machine.json(path / "preprocessor_config.json")
    keys = ("patch_size", "merge_size", "size", "min_pixels", "max_pixels")
    return {
        "image_token_id": config.get("image_token_id"),
        **{name: preprocessor.get(name) for name in keys},
    }


def _sizes(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    data, actor, rollout, queue = recipe.data, recipe.actor, recipe.rollout, recipe.queue
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
    if queue.group_policy == "k_of_n" and not 0 < queue.group_k <= rollout.n:
        yield (
            ("queue", "group_k"),
            f"queue.group_k: got {queue.group_k}, want 1 to rollout.n = {rollout.n} for k_of_n",
        )


def _algorithm(recipe: Recipe) -> Iterator[Problem]:
    """What estimator, loss and sampling ask of each other."""
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


def _each_branch(recipe: Recipe) -> Iterator[Problem]:
    """What reads a row as one sequence, and so cannot read one of several branches."""
    needs, key = algorithm_needs(recipe), "rollout.program_options.branch"
    for wrong, what in (
        (needs.reference, "a reference (actor.use_kl_loss, algorithm.use_kl_in_reward, a teacher)"),
        (needs.critic or needs.implicit_reward, "a model beside the policy"),
        (needs.whole_groups, f"the loss {recipe.actor.policy_loss.loss_mode}"),
        (recipe.algorithm.use_pf_ppo, "algorithm.use_pf_ppo"),
        (recipe.reward.token_rewards, "reward.token_rewards"),
    ):
        if wrong:
            yield (
                ("rollout", "program_options"),
                f"{key}: each, and {what} reads a row as one sequence; want another branch, or none of it",
            )


def _own_answers(recipe: Recipe) -> Iterator[Problem]:
    """What pairs of the data's answers with the policy's want beside the algorithm."""
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


def _vocabulary(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    """That the reference means the same by a token id as the policy: it is asked for the policy's tokens."""
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
                f"reference.path: {bare} has no tokenizer.json, so nobody can tell whether teacher and policy"
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


def _providers(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    """Every column that the run needs has a service that can write it, and that service its packages."""
    needs = algorithm_needs(recipe)
    for wanted, at, path, column in (
        (needs.reference, ("reference", "path"), recipe.reference.path, "`ref_logprobs`"),
        (needs.critic, ("critic", "path"), recipe.critic.path, "values"),
    ):
        if wanted and path is not None:
            for where, text in checkpoint_checks(at, path, machine):
                yield where, f"{text} ({_asker(recipe)} needs {column})"
    yield from _vocabulary(recipe, machine)
    modules = ["torch", "transformers"]
    if recipe.model.lora_rank:
        modules.append("peft")
    for module in modules:
        if not machine.installed(module):
            yield ("model",), f"model: this needs {module}: pip install 'meshrl[torch]'"
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
