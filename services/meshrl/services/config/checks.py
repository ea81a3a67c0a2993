"""What only the whole recipe, or the machine it runs on, can tell: sizes that must fit, names, files.

Each check yields the key to change and one sentence. None imports torch.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

from meshrl.contract import extend
from meshrl.services.config.fields import Loc
from meshrl.services.config.recipe import Recipe, needs_reference

Problem = tuple[Loc, str]


def cross_checks(recipe: Recipe) -> Iterator[Problem]:
    """Every problem, in the order of the sections."""
    yield from _model(("model", "path"), recipe.model.path)
    if recipe.tokenizer_dir != recipe.model.path:
        yield from _directory(("model", "tokenizer_path"), recipe.tokenizer_dir, "a tokenizer")
    yield from _data(recipe)
    yield from _sizes(recipe)
    yield from _names(recipe)
    yield from _providers(recipe)


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
            if path.is_file() and path.suffix not in (".parquet", ".jsonl"):
                yield at, f"data.{name}.{index}: {path} is neither .parquet nor .jsonl"


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
        (("rollout", "program"), "meshrl.rollout.programs"),
        (("queue", "store"), "meshrl.transferqueue.stores"),
        (("queue", "sampler"), "meshrl.transferqueue.samplers"),
        (("weights", "carrier"), "meshrl.services.weights.carriers"),
        (("algorithm", "adv_estimator"), "meshrl.trainer.advantages"),
    ):
        yield from _name(at, package, getattr(getattr(recipe, at[0]), at[1]))
    loss = recipe.actor.policy_loss.loss_mode
    yield from _name(("actor", "policy_loss", "loss_mode"), "meshrl.trainer.losses", loss)
    for index, function in enumerate(recipe.reward.functions):
        at_function: Loc = ("reward", "functions", index)
        if function.path is not None:
            yield from _file((*at_function, "path"), function.path)
        else:
            yield from _name((*at_function, "name"), "meshrl.rewardd.rewards", function.name)


def _name(at: Loc, package: str, name: str) -> Iterator[Problem]:
    key = ".".join(map(str, at))
    if "." in name:
        if not _importable(name):
            yield at, f"{key}: no module {name!r} can be imported"
        return
    names = extend.known(package)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        yield at, f"{key}: got {name!r}{hint} (known: {', '.join(names)}, or a dotted path)"


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _providers(recipe: Recipe) -> Iterator[Problem]:
    """Every column that the run needs has a service that can write it."""
    custom = recipe.reward.custom_reward_function.path
    if custom is not None:
        yield from _file(("reward", "custom_reward_function", "path"), custom)
    if needs_reference(recipe) and recipe.reference.path is not None:
        asks = (
            "algorithm.use_kl_in_reward"
            if recipe.algorithm.use_kl_in_reward
            else "actor.use_kl_loss"
        )
        for at, text in _model(("reference", "path"), recipe.reference.path):
            yield at, f"{text} ({asks} needs `ref_logprobs`)"
    for module, extra in (("torch", "torch"), ("transformers", "torch")):
        if not _importable(module):
            yield ("model",), f"model: this needs {module}: pip install 'meshrl[{extra}]'"
