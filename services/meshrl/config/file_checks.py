"""What stands in the files that a recipe names: checkpoints, the first rows of data, the functions of rewards."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from meshrl.common import plugins
from meshrl.config.explain import Loc
from meshrl.config.machine import ThisMachine
from meshrl.config.recipe import Recipe, algorithm_needs
from meshrl.contract.errors import ConfigError, MeshError, UserError
from meshrl.rewardd.config import RewardFunctionConfig
from meshrl.rewardd.pool.rule import REWARDS, SIGNATURE, check_call, find_function
from meshrl.rewardd.pool.signatures import Kind
from meshrl.sandbox.sandbox import Isolation
from meshrl.trainer.data.files import FileRow, has_reader, readable_files
from meshrl.trainer.data.gym_config import ReasoningGymConfig
from meshrl.trainer.data.mixture import source_of
from meshrl.trainer.data.prompts import PromptRow, own_answer, read_prompt_row
from meshrl.trainer.data.reasoning_gym import PACKAGE

Problem = tuple[Loc, str]
CHECKPOINT = "a Hugging Face checkpoint (config.json, *.safetensors, tokenizer)"
_EXPERTS = re.compile(r"\.experts\.")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def model_checks(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    """The policy's checkpoint, its tokenizer, and the modules that get an adapter."""
    wrong = list(checkpoint_checks(("model", "path"), recipe.model.path, machine))
    yield from wrong
    tokenizer = recipe.tokenizer_dir
    at: Loc = ("model", "path" if tokenizer == recipe.model.path else "tokenizer_path")
    if tokenizer != recipe.model.path:
        yield from _directory(at, tokenizer, "a tokenizer", machine)
    names = machine.names(tokenizer)
    if not wrong and names and not {*TOKENIZERS} & {*names}:
        yield at, f"{_key(at)}: {tokenizer} has no tokenizer ({', '.join(TOKENIZERS[:3])})"
    if recipe.model.lora_rank and not wrong:
        yield from _adapters(recipe, machine)
    if (start := recipe.model.lora_adapter_path) is not None:
        stored = machine.json(start / "adapter_config.json")
        if problem := recipe.model.adapter_mismatch(stored):
            yield ("model", "lora_adapter_path"), problem
        elif "adapter_model.safetensors" not in machine.names(start):
            yield (
                ("model", "lora_adapter_path"),
                f"model.lora_adapter_path: {start} has no adapter_model.safetensors",
            )


def _adapters(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    """That the patterns are some, and that what gets an adapter is there and is no experts' shared tensor."""
    targets, tensors = recipe.model.target_modules, machine.tensors(recipe.model.path)
    for key in ("target_modules", "exclude_modules"):
        pattern = getattr(recipe.model, key)
        try:
            re.compile(pattern if isinstance(pattern, str) else "")
        except re.error as error:
            yield ("model", key), f"model.{key}: {pattern!r} is no regular expression: {error}"
            return
    if tensors is None or targets == "all-linear":
        return
    at: Loc = ("model", "target_modules")
    modules = {name.removesuffix(".weight") for name in tensors if name.endswith(".weight")}
    experts = {name for name in tensors if _EXPERTS.search(name)}
    if experts and not recipe.model.exclude_modules:
        mixtures = {_EXPERTS.split(name)[0] for name in experts}
        routers = {f"{name}.gate" for name in mixtures} & modules  # one tensor, too
        shared = {name.removesuffix(".weight") for name in experts} | routers
        shared |= {f"{name}.experts" for name in mixtures}
        for target in [targets] if isinstance(targets, str) else targets:
            if any(_is_target(name, target, targets) for name in shared):
                yield (
                    at,
                    f"model.target_modules: {target!r} names experts, which share one tensor and get no adapter;"
                    " want modules of the attention, or all-linear",
                )
    # Mixtures are not looked through: transformers fuses their tensors under other names.
    for target in () if experts or isinstance(targets, str) else targets:
        if not any(_is_target(name, target, targets) for name in modules):
            last = sorted({name.rpartition(".")[2] for name in modules})
            near = difflib.get_close_matches(target, last, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield (
                at,
                f"model.target_modules: the model has no module {target!r}{hint} (it has {', '.join(last)})",
            )


def _is_target(module: str, target: str, targets: str | tuple[str, ...]) -> bool:
    """Whether peft would give the module an adapter: by a pattern, or by the end of its name."""
    if isinstance(targets, str):
        return re.fullmatch(target, module) is not None
    return module == target or module.endswith(f".{target}")


def checkpoint_checks(at: Loc, path: Path, machine: ThisMachine) -> Iterator[Problem]:
    """That a directory looks like a checkpoint."""
    wrong = list(_directory(at, path, CHECKPOINT, machine))
    yield from wrong
    if wrong:
        return
    names = machine.names(path)
    if "config.json" not in names:
        yield at, f"{_key(at)}: {path} has no config.json; want {CHECKPOINT}"
    elif not any(name.endswith((".safetensors", ".bin")) for name in names):
        yield at, f"{_key(at)}: {path} has no weights (*.safetensors); want {CHECKPOINT}"
    elif not machine.json(path / "config.json"):
        yield at, f"{_key(at)}: {path / 'config.json'} is no JSON object; want {CHECKPOINT}"


def file_checks(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    """The data files and the files of rewards."""
    yield from _data(recipe, machine)
    if (tokens := recipe.reward.registry.tokens) is not None:
        yield from missing_file(("reward", "registry", "tokens"), tokens, machine)
    for index, function in enumerate(recipe.reward.functions):
        if function.path is not None:
            yield from _reward(("reward", "functions", index), function.path, function, machine)
    custom = recipe.reward.custom_reward_function
    if custom.path is not None:
        own = RewardFunctionConfig(name=custom.name, path=custom.path, kwargs=custom.reward_kwargs)
        yield from _reward(("reward", "custom_reward_function"), custom.path, own, machine)


def _data(recipe: Recipe, machine: ThisMachine) -> Iterator[Problem]:
    if recipe.data.reasoning_gym is not None:
        yield from _gym(recipe, recipe.data.reasoning_gym, machine)
    elif not recipe.data.train_files:
        yield (
            ("data", "train_files"),
            "data.train_files is empty; want parquet or jsonl files, or data.reasoning_gym",
        )
    wrong_weights = list(_weights(recipe))
    yield from wrong_weights
    for name in ("train_files", "val_files"):
        for index, path in enumerate(getattr(recipe.data, name)):
            at: Loc = ("data", name, index)
            yield from missing_file(at, path, machine)
            if not machine.is_file(path):
                continue
            if not has_reader(path, recipe.data.reader):
                yield at, f"{_key(at)}: {path}: want {readable_files()} (data.reader)"
            elif "." not in (recipe.data.reader or ""):
                weights = {} if wrong_weights or name == "val_files" else recipe.data.weights
                yield from _rows(at, path, recipe, machine, weights)


def _weights(recipe: Recipe) -> Iterator[Problem]:
    """That nothing else says the order, and that files with a weight are among those to train on."""
    data, at = recipe.data, ("data", "weights")
    if data.weights and data.curriculum:
        yield at, "data.weights: data.curriculum says the order of prompts too; leave one out"
    for name in data.weights:
        path = Path(name)
        if has_reader(path, None) and path not in data.train_files:
            files = ", ".join(map(str, data.train_files))
            yield (*at, name), f"data.weights: {name} is none of data.train_files ({files})"


def _gym(recipe: Recipe, gym: ReasoningGymConfig, machine: ThisMachine) -> Iterator[Problem]:
    """Names and options of the tasks, and the isolation of a reward that evaluates what the policy wrote."""
    at: Loc = ("data", "reasoning_gym")
    if gym.chat and not _has_chat_template(recipe.tokenizer_dir, machine):
        yield (*at, "chat"), f"{_key(at)}.chat: the tokenizer has no chat template; set it to false"
    if gym.curriculum is not None:
        for wrong in _curriculum(recipe, gym):
            yield (*at, "curriculum"), f"{_key(at)}.curriculum: {wrong}"
    if not machine.installed(PACKAGE):
        yield at, f"{_key(at)} needs the package reasoning-gym, which is not installed"
    try:
        machine.check_gym(gym)
    except UserError as error:
        yield at, str(error)
    evaluated = sorted(
        gym.tasks.keys() & plugins.constant(REWARDS, "reasoning_gym", "EVALUATED", ())
    )
    scored = any(function.name == "reasoning_gym" for function in recipe.reward.functions)
    if evaluated and scored and recipe.reward.recipe_sandbox is not Isolation.STRICT:
        yield (
            ("reward", "recipe_sandbox"),
            f"reward.recipe_sandbox: want strict, since answers to {', '.join(evaluated)} are evaluated as Python",
        )


def _curriculum(recipe: Recipe, gym: ReasoningGymConfig) -> Iterator[str]:
    """What keeps levels from following the held-out scores."""
    data = recipe.data
    if recipe.trainer.test_freq <= 0:
        yield "follows held-out scores: want trainer.test_freq above 0"
    if 0 <= data.val_max_samples < gym.val_size:
        yield f"follows the scores of all {gym.val_size} held-out prompts: leave data.val_max_samples out"
    for name in ("train_files", "weights", "curriculum"):
        if getattr(data, name):
            yield f"says which prompts are asked, and so does data.{name}: leave one out"


def _rows(
    at: Loc, path: Path, recipe: Recipe, machine: ThisMachine, weights: Mapping[str, float]
) -> Iterator[Problem]:
    """The first fault of the first rows; a reader of the user's own is not run here."""
    try:
        rows = machine.first_rows(path, recipe.data.reader)
        if not rows:
            yield at, f"{_key(at)}: {path} has no rows"
        pictures = "vision_config" in machine.json(recipe.model.path / "config.json")
        for row in rows:
            read = _checked_row(row, recipe, machine, pictures)
            if at[1] == "train_files" and algorithm_needs(recipe).data_answers:
                own_answer(read.response, row.where, recipe.data)
            if weights:
                source_of(row.where, read.data_source, weights)
    except (UserError, UnicodeDecodeError) as error:
        text = f"{path}: not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        yield at, f"{_key(at)}: {text}"


def _checked_row(row: FileRow, recipe: Recipe, machine: ThisMachine, pictures: bool) -> PromptRow:
    read = read_prompt_row(row, recipe.data, pictures=pictures)
    if isinstance(read.prompt, str):
        if not read.prompt:
            raise UserError(f"{row.where}: the prompt is empty")
    elif not _has_chat_template(recipe.tokenizer_dir, machine):
        raise UserError(f"{row.where}: the prompt is a chat and the tokenizer has no chat template")
    return read


def _has_chat_template(tokenizer: Path, machine: ThisMachine) -> bool:
    """True also where it cannot be told."""
    names = machine.names(tokenizer)
    if "tokenizer_config.json" not in names:
        return True
    beside = "chat_template.jinja" in names or "chat_template.json" in names
    return beside or bool(machine.json(tokenizer / "tokenizer_config.json").get("chat_template"))


def _reward(
    at: Loc, path: Path, function: RewardFunctionConfig, machine: ThisMachine
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
            check_call(node, Kind.COMPUTE_SCORE, function.kwargs, str(path))
    except MeshError as error:
        yield (*at, "path"), f"{_key(at)}: {error}"


def _directory(at: Loc, path: Path, what: str, machine: ThisMachine) -> Iterator[Problem]:
    if not machine.exists(path):
        near = _near(path, machine)
        yield at, f"{_key(at)}: no such directory: {path}{near}; want the directory of {what}"
    elif machine.is_file(path):
        yield at, f"{_key(at)}: {path} is a file; want the directory of {what}"


def missing_file(at: Loc, path: Path, machine: ThisMachine) -> Iterator[Problem]:
    """Says that there is no such file, and which one may be meant."""
    if not machine.exists(path):
        yield at, f"{_key(at)}: no such file: {path}{_near(path, machine)}"
    elif not machine.is_file(path):
        yield at, f"{_key(at)}: {path} is a directory; want a file"


def _near(path: Path, machine: ThisMachine) -> str:
    """The entry beside a missing path that looks most like it."""
    close = difflib.get_close_matches(path.name, machine.names(path.parent), n=1)
    return f" (did you mean {path.parent / close[0]}?)" if close else ""


def _key(at: Loc) -> str:
    return ".".join(map(str, at))
