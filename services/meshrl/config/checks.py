"""What only the whole recipe, or the machine it runs on, can tell: sizes that must fit, names, files.

Each check yields the key to change and one sentence. None imports torch.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

from meshrl.config import stages
from meshrl.config.explain import Loc
from meshrl.config.recipe import Recipe, algorithm_needs
from meshrl.config.weights import CARRIERS
from meshrl.contract import plugins
from meshrl.contract.config import read_options
from meshrl.contract.errors import ConfigError
from meshrl.trainer.algorithms import needs as algorithm_rules
from meshrl.trainer.data.files import READERS, has_reader, readable_files

Problem = tuple[Loc, str]
PROGRAMS = "meshrl.rollout.programs"


def cross_checks(recipe: Recipe) -> Iterator[Problem]:
    """Every problem, in the order of the sections."""
    yield from _model(("model", "path"), recipe.model.path)
    if recipe.tokenizer_dir != recipe.model.path:
        yield from _directory(("model", "tokenizer_path"), recipe.tokenizer_dir, "a tokenizer")
    yield from _data(recipe)
    yield from _sizes(recipe)
    yield from _names(recipe)
    yield from _program_options(recipe)
    yield from _algorithm(recipe)
    yield from _providers(recipe)
    yield from _stages(recipe)


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


def _directory(at: Loc, path: Path, what: str) -> Iterator[Problem]:
    key = ".".join(map(str, at))
    if not path.exists():
        yield at, f"{key}: no such directory: {path}{_near(path)}; want the directory of {what}"
    elif not path.is_dir():
        yield at, f"{key}: {path} is a file; want the directory of {what}"


def _file(at: Loc, path: Path) -> Iterator[Problem]:
    if not path.is_file():
        yield at, f"{'.'.join(map(str, at))}: no such file: {path}{_near(path)}"


def _near(path: Path) -> str:
    """The entry beside a missing path that looks most like it."""
    if not path.parent.is_dir():
        return ""
    beside = [entry.name for entry in path.parent.iterdir()]
    close = difflib.get_close_matches(path.name, beside, n=1)
    return f" (did you mean {path.parent / close[0]}?)" if close else ""


def _model(at: Loc, path: Path) -> Iterator[Problem]:
    what = "a Hugging Face checkpoint (config.json, *.safetensors, tokenizer)"
    wrong = list(_directory(at, path, what))
    yield from wrong
    if wrong:
        return
    key = ".".join(map(str, at))
    if not (path / "config.json").is_file():
        yield at, f"{key}: {path} has no config.json; want {what}"
    elif not [*path.glob("*.safetensors"), *path.glob("*.bin")]:
        yield at, f"{key}: {path} has no weights (*.safetensors); want {what}"


def _data(recipe: Recipe) -> Iterator[Problem]:
    if not recipe.data.train_files:
        yield ("data", "train_files"), "data.train_files is empty; want parquet or jsonl files"
    for name in ("train_files", "val_files"):
        for index, path in enumerate(getattr(recipe.data, name)):
            at: Loc = ("data", name, index)
            yield from _file(at, path)
            if path.is_file() and not has_reader(path, recipe.data.reader):
                yield at, f"data.{name}.{index}: {path}: want {readable_files()} (data.reader)"


def _sizes(recipe: Recipe) -> Iterator[Problem]:
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
    shared, ranks = recipe.model.ulysses_sequence_parallel_size, recipe.trainer.nproc
    if ranks % shared:
        yield (
            ("model", "ulysses_sequence_parallel_size"),
            f"model.ulysses_sequence_parallel_size: {shared} does not divide trainer.nproc, {ranks}",
        )
    positions = _max_positions(recipe.model.path)
    if positions is not None and positions < longest:
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


def _max_positions(model: Path) -> int | None:
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return None
    positions = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return positions if isinstance(positions, int) else None


def _names(recipe: Recipe) -> Iterator[Problem]:
    """Every name that is a file name. Looked up, not imported: an engine may import torch."""
    for at, package in (
        (("rollout", "name"), "meshrl.rollout.engines"),
        (("rollout", "program"), PROGRAMS),
        (("queue", "store"), "meshrl.transferqueue.stores"),
        (("queue", "sampler"), "meshrl.transferqueue.samplers"),
        (("weights", "carrier"), CARRIERS),
        (("algorithm", "adv_estimator"), "meshrl.trainer.algorithms.advantages"),
    ):
        yield from _name(at, package, getattr(getattr(recipe, at[0]), at[1]))
    library = recipe.weights.nccl.library
    libraries = "meshrl.weights.nccl.libraries"
    yield from _name(("weights", "nccl", "library"), libraries, library)
    devices = "meshrl.weights.ipc.devices"
    yield from _name(("weights", "ipc", "library"), devices, recipe.weights.ipc.library)
    for index, carrier in enumerate(recipe.weights.among):
        yield from _name(("weights", "among", index), CARRIERS, carrier)
    loss = recipe.actor.policy_loss.loss_mode
    yield from _name(
        ("actor", "policy_loss", "loss_mode"), "meshrl.trainer.algorithms.losses", loss
    )
    if recipe.data.reader is not None:
        yield from _name(("data", "reader"), READERS, recipe.data.reader)
    if recipe.data.curriculum is not None:
        at_order: Loc = ("data", "curriculum")
        yield from _name(at_order, "meshrl.trainer.data.curricula", recipe.data.curriculum)
    for index, function in enumerate(recipe.reward.functions):
        at_function: Loc = ("reward", "functions", index)
        if function.path is not None:
            yield from _file((*at_function, "path"), function.path)
        else:
            yield from _name((*at_function, "name"), "meshrl.rewardd.rewards", function.name)


def _program_options(recipe: Recipe) -> Iterator[Problem]:
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
    except ConfigError as error:
        yield ("rollout", "program_options"), str(error)


def _name(at: Loc, package: str, name: str) -> Iterator[Problem]:
    key = ".".join(map(str, at))
    if "." in name:
        if not _importable(name):
            yield at, f"{key}: no module {name!r} can be imported"
        return
    names = plugins.known(package)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        yield at, f"{key}: got {name!r}{hint} (known: {', '.join(names)}, or a dotted path)"


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


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
    judged = recipe.algorithm.filter_groups
    low, high = judged.low, judged.high
    if judged.enable and low is not None and high is not None and low > high:
        yield (
            ("algorithm", "filter_groups", "low"),
            f"algorithm.filter_groups.low: {low:g} is above high, {high:g}",
        )


def _asker(recipe: Recipe) -> str:
    """The key that makes the algorithm need a model beside the policy."""
    if recipe.algorithm.use_kl_in_reward:
        return "algorithm.use_kl_in_reward"
    if recipe.actor.use_kl_loss:
        return "actor.use_kl_loss"
    if algorithm_needs(recipe).critic:
        return f"algorithm.adv_estimator {recipe.algorithm.adv_estimator}"
    return f"actor.policy_loss.loss_mode {recipe.actor.policy_loss.loss_mode}"


def _providers(recipe: Recipe) -> Iterator[Problem]:
    """Every column that the run needs has a service that can write it."""
    custom = recipe.reward.custom_reward_function.path
    if custom is not None:
        yield from _file(("reward", "custom_reward_function", "path"), custom)
    needs = algorithm_needs(recipe)
    for wanted, at, path, column in (
        (needs.reference, ("reference", "path"), recipe.reference.path, "`ref_logprobs`"),
        (needs.critic, ("critic", "path"), recipe.critic.path, "values"),
    ):
        if wanted and path is not None:
            for where, text in _model(at, path):
                yield where, f"{text} ({_asker(recipe)} needs {column})"
    modules = ["torch", "transformers", *(["peft"] if recipe.model.lora_rank else [])]
    for module in modules:
        if not _importable(module):
            yield ("model",), f"model: this needs {module}: pip install 'meshrl[torch]'"
