"""Checks of the sections `model`, `trainer`, `actor` and `data`: checkpoints, what ranks share, rows of files."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from meshrl.common.checks import Loc, Problem, check_directory, dotted, missing_file
from meshrl.common.config import Machine
from meshrl.common.object_store import ObjectStore
from meshrl.common.plain_text import counted
from meshrl.common.user_functions import check_function
from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.types import Json
from meshrl.trainer.checkpoint.afterwards import COPIES, FUNCTION
from meshrl.trainer.config import ActorConfig, DataConfig, ModelConfig, TrainerConfig
from meshrl.trainer.data.files import FOLDERS, has_reader, readable_files
from meshrl.trainer.data.prompt_streams import source_of
from meshrl.trainer.data.prompts import (
    PromptTokenizer,
    fitted,
    no_prompts,
    own_answer,
    read_prompt_row,
    tokenised,
)
from meshrl.trainer.data.reasoning_gym import PACKAGE, ReasoningGymConfig
from meshrl.trainer.model.untrainable import NO_SHARES, WANTED, keeps_state, refusal, spread_fault

CHECKPOINT = "a Hugging Face checkpoint (config.json, *.safetensors, tokenizer)"
_EXPERTS = re.compile(r"\.experts\.")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings")
"""Last words of the names of input and output embeddings, whose weights the trainer reads past their forward."""
FIRST_ROWS = 8
"""Rows that are read of each data file: a wrong column or schema shows in the first one."""
MOST_ROWS = 256
"""Rows that are read to find one that is not too long."""
ROUTER_BIAS = "e_score_correction_bias"
"""Bias that a router adds to its scores to choose experts, as transformers' models name it."""


def check_model(model: ModelConfig, machine: Machine) -> Iterator[Problem]:
    """The policy's checkpoint, its tokenizer, and the modules that get an adapter."""
    wrong = list(check_checkpoint(("model", "path"), model.path, machine))
    yield from wrong
    tokenizer = model.tokenizer_path or model.path
    at: Loc = ("model", "path" if tokenizer == model.path else "tokenizer_path")
    if tokenizer != model.path:
        yield from check_directory(at, tokenizer, "a tokenizer", machine)
    names = machine.names(tokenizer)
    if not wrong and names and not {*TOKENIZERS} & {*names}:
        yield at, f"{dotted(at)}: {tokenizer} has no tokenizer ({', '.join(TOKENIZERS[:3])})"
    if model.lora_rank and not wrong:
        yield from _adapters(model, machine)
    if (start := model.lora_adapter_path) is not None and machine.known(start):
        stored = machine.json(start / "adapter_config.json")
        if problem := model.adapter_mismatch(stored):
            yield ("model", "lora_adapter_path"), problem
        elif "adapter_model.safetensors" not in machine.names(start):
            yield (
                ("model", "lora_adapter_path"),
                f"model.lora_adapter_path: {start} has no adapter_model.safetensors",
            )


def _adapters(model: ModelConfig, machine: Machine) -> Iterator[Problem]:
    """Check that the patterns match tensors that exist and are not shared by experts."""
    targets, tensors = model.target_modules, machine.tensors(model.path)
    for key in ("target_modules", "exclude_modules"):
        pattern = getattr(model, key)
        try:
            re.compile(pattern if isinstance(pattern, str) else "")
        except re.error as error:
            yield ("model", key), f"model.{key}: {pattern!r} is not a regular expression: {error}"
            return
    at: Loc = ("model", "target_modules")
    if not targets:
        yield at, "model.target_modules is empty: want names of modules, or all-linear"
    if tensors is None:
        return
    shapes = {
        name.removesuffix(".weight"): shape
        for name, shape in tensors.items()
        if name.endswith(".weight")
    }
    experts = {name for name in tensors if _EXPERTS.search(name)}
    if experts and not model.exclude_modules and targets != "all-linear":
        mixtures = {_EXPERTS.split(name)[0] for name in experts}
        routers = {f"{name}.gate" for name in mixtures} & shapes.keys()  # one tensor, too
        shared = {name.removesuffix(".weight") for name in experts} | routers
        shared |= {f"{name}.experts" for name in mixtures}
        for target in [targets] if isinstance(targets, str) else targets:
            if any(_is_target(name, target, targets) for name in shared):
                yield (
                    at,
                    f"model.target_modules: {target!r} names experts, which share one tensor and get no adapter;"
                    " want modules of the attention, or all-linear",
                )
    # Mixtures and models of pictures are not looked through: transformers gives their tensors other names.
    if experts or "vision_config" in machine.json(model.path / "config.json"):
        return
    linear = {n for n, shape in shapes.items() if len(shape) > 1 and not n.endswith(EMBEDDINGS)}
    last = sorted({name.rpartition(".")[2] for name in linear})
    for key in ("target_modules", "exclude_modules"):
        named = getattr(model, key)
        for target in [named] if isinstance(named, str) else named:
            found = {name for name in shapes if _is_target(name, target, named)}
            if target == "all-linear" or (found and (found <= linear or key == "exclude_modules")):
                continue
            what = f"the model has no module {target!r}"
            if found:
                other = min(found - linear)
                what = f"{target!r} names {other}, which is not a linear layer and gets no adapter"
            elif isinstance(named, str) and any(_is_target(name, target, ()) for name in shapes):
                what = f"{target!r} is a pattern of full names, and no module has this one; did you mean [{target}]?"
            elif near := difflib.get_close_matches(target, last, n=1):
                what += f"; did you mean {near[0]!r}?"
            yield ("model", key), f"model.{key}: {what} (it has {', '.join(last)})"


def _is_target(module: str, target: str, targets: str | tuple[str, ...]) -> bool:
    """Whether peft would give the module an adapter: by a pattern, or by the end of its name."""
    if isinstance(targets, str):
        return re.fullmatch(target, module) is not None
    return module == target or module.endswith(f".{target}")


def check_checkpoint(at: Loc, path: Path, machine: Machine) -> Iterator[Problem]:
    """Check that a directory looks like a checkpoint."""
    wrong = list(check_directory(at, path, CHECKPOINT, machine))
    yield from wrong
    if wrong or not machine.known(path):
        return
    names = machine.names(path)
    if "config.json" not in names:
        yield at, f"{dotted(at)}: {path} has no config.json; want {CHECKPOINT}"
    elif not machine.json(path / "config.json"):
        yield at, f"{dotted(at)}: {path / 'config.json'} is no JSON object; want {CHECKPOINT}"
    else:
        try:
            _check_weights(path, machine)
        except UserError as error:
            yield at, f"{dotted(at)}: {error}"


def _check_weights(path: Path, machine: Machine) -> None:
    """Raises UserError where the files of weights are not those that are read, or not all of them."""
    names = machine.names(path)
    if INDEX not in names and WEIGHTS not in names:
        pickled = next((name for name in names if name.endswith(".bin")), None)
        if pickled is None:
            raise UserError(f"{path} has no weights ({WEIGHTS}); want {CHECKPOINT}")
        raise UserError(
            f"{path} has its weights in {pickled}, and only {WEIGHTS} is read: write it with transformers,"
            f" AutoModelForCausalLM.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
        )
    listed = machine.json(path / INDEX).get("weight_map")
    if INDEX not in names:
        machine.shapes(path / WEIGHTS)
        return
    if not isinstance(listed, dict) or not listed:
        raise UserError(
            f"{path / INDEX} has no weight_map; want the index that came with the weights"
        )
    files = sorted({str(file) for file in listed.values()})
    if gone := [file for file in files if file not in names]:
        raise UserError(
            f"{path} lacks {len(gone)} of the {len(files)} files that {INDEX} names, as {gone[0]}: want all"
        )
    for file in files:
        found = {name for name in machine.shapes(path / file) if not name.endswith(".inv_freq")}
        wanted = {name for name, of in listed.items() if of == file}
        if different := sorted(wanted - found) or sorted(found - wanted):
            fault = "lacks" if wanted - found else f"has beside what {INDEX} names"
            raise UserError(
                f"{path / file} {fault} {counted(len(different), 'tensor')}, as {different[0]}: want the index and"
                " the files of one checkpoint"
            )


def check_trainable(at: Loc, path: Path, machine: Machine) -> Iterator[Problem]:
    """Problems of the model in packed training."""
    if why := refusal(machine.json(path / "config.json")):
        yield at, f"{dotted(at)}: {path} is not supported: {why}; {WANTED}"
    elif at[0] == "model" and "lm_head.bias" in (machine.tensors(path) or ()):
        yield (
            at,
            f"model.path: the output embedding of {path} has a bias, which is not supported; want another model",
        )


def check_after_checkpoint(trainer: TrainerConfig) -> Iterator[Problem]:
    """The function that is called after checkpoints, and the store that gets copies of them."""
    try:
        if trainer.after_checkpoint is not None:
            check_function(trainer.after_checkpoint, FUNCTION)
    except ConfigError as error:
        yield ("trainer", "after_checkpoint"), str(error)
    try:
        if trainer.copy_checkpoints_to is not None:
            ObjectStore(trainer.copy_checkpoints_to, COPIES)
    except ConfigError as error:
        yield ("trainer", "copy_checkpoints_to"), str(error)


def check_parallel(
    trainer: TrainerConfig, model: ModelConfig, machine: Machine
) -> Iterator[Problem]:
    """Whether ranks, heads and experts can be sharded as `trainer.parallel` says."""
    key, at = "trainer.parallel", ("trainer", "parallel")
    shared = model.ulysses_sequence_parallel_size
    parallel = trainer.parallel.model_copy(update={"sequence": shared})
    for name, fault in parallel.faults(trainer.ranks, _ranks(trainer)):
        yield (*at, name), fault
        return
    config = machine.json(model.path / "config.json")
    heads, sharers = config.get("num_attention_heads"), parallel.tensor * parallel.sequence
    if isinstance(heads, int) and heads % sharers:
        yield (
            at,
            f"{key}: sequence x tensor, {sharers}, does not divide the model's {heads} attention heads",
        )
    if sharers > 1 and keeps_state(config):
        one: Loc = ("model", "ulysses_sequence_parallel_size") if shared > 1 else (*at, "tensor")
        yield one, f"{dotted(one)}: {NO_SHARES}"
        return
    if parallel.tensor > 1:
        yield from _tensor(parallel.tensor, model.path, config)
    named = (config.get(f"{kind}_experts") for kind in ("num", "num_local", "n_routed"))
    experts = next((number for number in named if isinstance(number, int)), None)
    if parallel.expert > 1 and config and experts is None:
        yield (*at, "expert"), f"{key}.expert: {model.path} has no experts; want 1"
    elif parallel.expert > 1 and (fault := spread_fault(config)):
        yield (*at, "expert"), f"{key}.expert: {fault}"
    which = "expert" if parallel.expert > 1 else "tensor"
    if experts is not None and experts % max(parallel.expert, parallel.tensor):
        yield (
            (*at, which),
            f"{key}.{which}: {getattr(parallel, which)} does not divide the {experts} experts of {model.path}",
        )
    if model.lora_rank and parallel.tensor > 1:
        yield (*at, "tensor"), f"{key}.tensor: adapters are not shared among ranks; want 1"
    if model.use_torch_compile and (parallel.expert > 1 or parallel.tensor > 1):
        yield (
            ("model", "use_torch_compile"),
            f"model.use_torch_compile: layers are not compiled with {key}.{which}; want false, or 1 there",
        )


def _tensor(size: int, model: Path, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Whether tensor ranks can share what the model has of a kind. Latent attention has no key heads to share."""
    mixture = config.get("num_experts_per_tok")
    for name, what, there in (
        ("num_key_value_heads", "key heads", not config.get("kv_lora_rank")),
        ("intermediate_size", "intermediate_size", not mixture),
    ):
        number = config.get(name)
        if there and isinstance(number, int) and number % size:
            yield (
                ("trainer", "parallel", "tensor"),
                f"trainer.parallel.tensor: {size} does not divide the {number} {what} of {model}; want"
                f" {_divisors(number, size)}",
            )
            return


def _divisors(number: int, below: int) -> str:
    """The divisors of a number that are below another one, for a message."""
    return " or ".join(str(each) for each in range(1, below) if number % each == 0)


def _ranks(trainer: TrainerConfig) -> str:
    machines = f" * trainer.nnodes, {trainer.ranks}" if trainer.nnodes > 1 else f", {trainer.nproc}"
    return f"trainer.nproc{machines}"


def check_experts(actor: ActorConfig, model: ModelConfig, machine: Machine) -> Iterator[Problem]:
    """Whether a mixture's experts can be kept busy as `actor` says."""
    config = machine.json(model.path / "config.json")
    for name in ("router_aux_loss_coef", "moe_router_bias_update_rate"):
        if not getattr(actor, name):
            continue
        key = f"actor.{name}"
        if config and not config.get("num_experts_per_tok"):
            yield ("actor", name), f"{key}: {model.path} has no experts; want 0"
        if model.use_torch_compile:
            yield (
                ("actor", name),
                f"{key}: compiled layers hide what is chosen; want 0, or no model.use_torch_compile",
            )
    if actor.moe_router_bias_update_rate and model.lora_rank:
        yield (
            ("actor", "moe_router_bias_update_rate"),
            "actor.moe_router_bias_update_rate: an adapter holds no biases; want 0",
        )
    tensors = machine.tensors(model.path)
    if (
        actor.moe_router_bias_update_rate
        and config.get("num_experts_per_tok")
        and tensors is not None
        and not any(name.endswith(ROUTER_BIAS) for name in tensors)
    ):
        yield (
            ("actor", "moe_router_bias_update_rate"),
            f"actor.moe_router_bias_update_rate: the routers of {model.path} have no {ROUTER_BIAS}; want 0, or"
            " router_aux_loss_coef",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataUse:
    """Facts from other sections that the checks of the data need."""

    tokenizer: PromptTokenizer | None
    """None: it is elsewhere, or wrong."""
    vocabulary: int
    """Tokens that the model knows; 0: not known."""
    pictures: bool
    """Whether the model is a vision-language model."""
    own_answers: bool
    """The algorithm learns from the data's answers."""
    unusable: Callable[[str, Mapping[str, Json]], str]
    """Why rows of a `data_source` with an `extra_info` have no task or no score; empty where they have."""
    test_freq: int


def check_data(data: DataConfig, use: DataUse, machine: Machine) -> Iterator[Problem]:
    """Files, their first rows, weights, and the tasks of reasoning-gym."""
    if data.reasoning_gym is not None:
        yield from _gym(data, data.reasoning_gym, use, machine)
    elif not data.train_files:
        yield (
            ("data", "train_files"),
            "data.train_files is empty; want parquet or jsonl files, or data.reasoning_gym",
        )
    wrong_weights = list(_weights(data))
    yield from wrong_weights
    for name in ("train_files", "val_files"):
        for index, path in enumerate(getattr(data, name)):
            at: Loc = ("data", name, index)
            file, by_folder = machine.is_file(path), data.reader in (None, FOLDERS)
            tasks = by_folder and not file and bool(machine.names(path))
            if not tasks:
                yield from missing_file(at, path, machine)
            if not tasks and not file:
                continue
            if not tasks and not has_reader(path, data.reader):
                yield at, f"{dotted(at)}: {path}: want {readable_files()} (data.reader)"
            elif "." not in (data.reader or "") and machine.known(path):
                weights = {} if wrong_weights or name == "val_files" else data.weights
                yield from _rows(at, path, data, use, machine, weights)


def _weights(data: DataConfig) -> Iterator[Problem]:
    """Check that nothing else sets the order, and that files with a weight are training files."""
    at: Loc = ("data", "weights")
    if data.weights and data.curriculum:
        yield at, "data.weights: data.curriculum says the order of prompts too; leave one out"
    for name in data.weights:
        path = Path(name)
        if has_reader(path, None) and path not in data.train_files:
            files = ", ".join(map(str, data.train_files))
            yield (*at, name), f"data.weights: {name} is none of data.train_files ({files})"


def _gym(
    data: DataConfig, gym: ReasoningGymConfig, use: DataUse, machine: Machine
) -> Iterator[Problem]:
    """Names and options of the tasks, and what keeps their levels."""
    at: Loc = ("data", "reasoning_gym")
    if gym.chat and use.tokenizer is not None and not use.tokenizer.chat_template:
        yield (
            (*at, "chat"),
            f"{dotted(at)}.chat: the tokenizer has no chat template; set it to false",
        )
    if gym.curriculum is not None:
        for wrong in _curriculum(data, gym, use.test_freq):
            yield (*at, "curriculum"), f"{dotted(at)}.curriculum: {wrong}"
    if not machine.installed(PACKAGE):
        yield at, f"{dotted(at)} needs the package reasoning-gym, which is not installed"
    try:
        machine.check_gym(gym)
    except UserError as error:
        yield at, str(error)


def _curriculum(data: DataConfig, gym: ReasoningGymConfig, test_freq: int) -> Iterator[str]:
    """Settings that keep levels from following the held-out scores."""
    if test_freq <= 0:
        yield "follows held-out scores: want trainer.test_freq above 0"
    if 0 <= data.val_max_samples < gym.val_size:
        yield f"follows the scores of all {gym.val_size} held-out prompts: leave data.val_max_samples out"
    for name in ("train_files", "weights", "curriculum"):
        if getattr(data, name):
            yield f"says which prompts are asked, and so does data.{name}: leave one out"


def _rows(
    at: Loc,
    path: Path,
    data: DataConfig,
    use: DataUse,
    machine: Machine,
    weights: Mapping[str, float],
) -> Iterator[Problem]:
    """The first fault of the first rows, read as the feeder does; a reader of the user's own is not run here.

    Where they are all too long, more rows are read, up to one that is not.
    """
    lengths, left = list[int](), False
    try:
        for index, source in enumerate(islice(machine.rows(path, data.reader), MOST_ROWS)):
            if left and index >= FIRST_ROWS:
                break
            row = read_prompt_row(source, data, pictures=use.pictures)
            if at[1] == "train_files" and use.own_answers:
                own_answer(row.response, row.where, data)
            if weights:
                source_of(row.where, row.data_source, weights)
            if why := use.unusable(row.data_source, row.extra_info):
                raise UserError(f"{row.where}: {why}")
            if use.tokenizer is None:
                lengths.append(0)
                left = True
                continue
            prompt = tokenised(index, row, data, use.tokenizer, None, use.vocabulary)
            lengths.append(len(prompt.prompt_ids))
            left = left or fitted(prompt, data) is not None
        if not left and len(lengths) < MOST_ROWS:
            raise no_prompts([path], lengths, data)
    except (UserError, UnicodeDecodeError) as error:
        text = f"{path}: not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        yield at, f"{dotted(at)}: {text}"
