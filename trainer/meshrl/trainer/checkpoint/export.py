"""Hugging Face checkpoints out of a live model or a run's checkpoint, readable by any engine."""

from __future__ import annotations

import copy
import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file

from meshrl.contract.errors import InfraError, UserError
from meshrl.trainer.checkpoint import checkpoint
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model import lora
from meshrl.trainer.model.policy import Policy, build_policy, open_hf
from meshrl.trainer.ranks.world import World

GENERATION_FILE = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    GENERATION_FILE,
)
PICTURE_FILES = ("*preprocessor_config.json", "processor_config.json")
"""Settings of image processors, in the checkpoint that the policy comes from."""


MAX_SHARD_SIZE = "5GB"
SHARED_OUT = 10**9
"""A model of more bytes is written by all ranks."""


def export_policy(
    policy: Policy,
    world: World,
    target: Path,
    *,
    tokenizer: Path,
    dtype: str = "float32",
    max_shard_size: str = MAX_SHARD_SIZE,
    end: int | None = None,
) -> Path:
    """Write config, safetensors and tokenizer files to `target`, replacing what is there; LoRA is merged.

    Every rank calls this, and writes its share of the safetensors files: it holds two of them at most. Of more than
    `SHARED_OUT` bytes there is one for each rank at least. The directory appears by a rename, never half-written.

    Args:
        policy: The model.
        world: The ranks.
        target: The directory to make.
        tokenizer: Directory whose tokenizer files are copied.
        dtype: Type of the stored weights; buffers keep theirs.
        max_shard_size: Largest safetensors file, such as `5GB`; a model that is larger gets several and an index.
        end: The token with which the model has learned to end; generation_config.json names it, so that engines do.

    Raises:
        InfraError: a rank cannot write.
    """
    writing = target.with_name(f".writing-{target.name}")
    if world.is_main:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    world.barrier()
    hf, kind = policy.hf, getattr(torch, dtype)
    stored = hf.state_dict().keys()
    buffers = {n: b for n, b in hf.named_buffers() if n in stored}
    weights = dict(policy.published_weights(frozen=True)) | {
        n: lora.Weight(b) for n, b in buffers.items()
    }
    kinds = {name: buffers[name].dtype if name in buffers else kind for name in weights}
    blanks = {n: torch.empty(w.shape, dtype=kinds[n], device="meta") for n, w in weights.items()}
    files = _files(blanks, max_shard_size, world.size)
    problem, under_way = "", Future[None]()
    under_way.set_result(None)
    with ThreadPoolExecutor(1) as writer:  # the gather of the other ranks' files continues
        for number, (file, names) in enumerate(files.filename_to_tensors.items()):
            own = {}
            for name in names:
                whole = weights[name].whole(kinds[name])
                if number % world.size == world.rank:
                    own[name] = whole.cpu().clone()
            if own:
                problem = problem or _problem(under_way, target)
                under_way = writer.submit(save_file, own, writing / file, {"format": "pt"})
    problem = problem or _problem(under_way, target)
    if problem := next(filter(None, world.all_gather_text(problem)), ""):
        if world.is_main:
            shutil.rmtree(writing, ignore_errors=True)  # a full disk has no room for half of one
        raise InfraError(problem)
    if world.is_main:
        _describe(policy, writing, dtype, files)
        if end is not None:
            _end_with(end, writing, getattr(policy.hf.config, "eos_token_id", None))
        _finish(writing, target, tokenizer)
    world.barrier()
    return target


def _problem(written: Future[None], target: Path) -> str:
    """Why a file could not be written: raised on one rank alone, it would leave the others waiting."""
    try:
        written.result()
    except (OSError, SafetensorError) as error:
        return f"cannot export {target}: {error}"
    return ""


def _files(blanks: dict[str, torch.Tensor], largest: str, ranks: int) -> StateDictSplit:
    """Which tensors go into which file, in order."""
    files = split_torch_state_dict_into_shards(blanks, max_shard_size=largest)
    total = sum(blank.nbytes for blank in blanks.values())
    if total > SHARED_OUT and len(files.filename_to_tensors) < ranks:
        return split_torch_state_dict_into_shards(blanks, max_shard_size=-(-total // ranks))
    return files


def _describe(policy: Policy, folder: Path, dtype: str, files: StateDictSplit) -> None:
    """config.json, generation_config.json and the index of the files, where there are several."""
    config = copy.deepcopy(policy.hf.config)
    config.architectures, config.dtype = [type(policy.hf).__name__], dtype
    config.save_pretrained(folder)
    generation = Path(config.name_or_path) / GENERATION_FILE
    if generation.is_file():
        shutil.copy2(generation, folder / GENERATION_FILE)
    for pattern in PICTURE_FILES if policy.tower is not None else ():
        for file in Path(config.name_or_path).glob(pattern):
            shutil.copy2(file, folder / file.name)
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True)
        (folder / "model.safetensors.index.json").write_text(text)


def _end_with(end: int, folder: Path, known: int | list[int] | None) -> None:
    """Add `end` to what generation_config.json ends a response with; `known` counts where it says nothing."""
    file = folder / GENERATION_FILE
    settings = json.loads(file.read_text()) if file.is_file() else {}
    given = settings.get("eos_token_id", known)
    ends: list[int] = []
    if given is not None:
        ends = given if isinstance(given, list) else [given]
    if end not in ends:
        settings["eos_token_id"] = [*ends, end]
        file.write_text(json.dumps(settings, indent=2))


def export_adapter(
    policy: Policy, world: World, target: Path, config: ModelConfig, *, tokenizer: Path, dtype: str
) -> Path:
    """Write the policy's LoRA adapter as peft reads it, with the tokenizer's files; as `export_policy`.

    Raises:
        UserError: the policy has none.
    """
    if policy.adapter is None:
        raise UserError("there is no adapter: the run trains all weights (model.lora_rank 0)")
    kind = getattr(torch, dtype)
    tensors = {f"{lora.PREFIX}{name}": w.whole(kind).cpu() for name, w in policy.named_adapters()}
    if world.is_main:
        writing = target.with_name(f".writing-{target.name}")
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        save_file(tensors, writing / lora.WEIGHTS_FILE)
        settings = lora.peft_settings(config, policy.hf)
        (writing / lora.SETTINGS_FILE).write_text(json.dumps(settings, indent=2))
        _finish(writing, target, tokenizer)
    world.barrier()
    return target


def _finish(writing: Path, target: Path, tokenizer: Path) -> None:
    """Copy the tokenizer's files into `writing` and rename it to `target`, as readable as the umask lets it be.

    Safetensors' files are closed to other users, and copies have the modes of what they are copied from.
    """
    for pattern in TOKENIZER_FILES:
        for file in sorted(tokenizer.glob(pattern)):
            if file.is_file() and not (writing / file.name).exists():
                shutil.copy2(file, writing / file.name)
    mode = writing.stat().st_mode & 0o666  # made with mkdir: less the umask
    for file in writing.iterdir():
        file.chmod(mode)
    shutil.rmtree(target, ignore_errors=True)
    writing.rename(target)


def export_checkpoint(
    path: Path,
    target: Path,
    *,
    model: Path,
    tokenizer: Path | None = None,
    dtype: str = "float32",
    max_shard_size: str = MAX_SHARD_SIZE,
    adapter_only: bool = False,
) -> Path:
    """Turn a checkpoint directory (or a run's directory of them: the newest) into a Hugging Face one.

    Args:
        path: `…/checkpoints/step-…` or `…/checkpoints`.
        target: The directory to make.
        model: The model that the run started from: its architecture, and with LoRA its weights, are read.
        tokenizer: Directory of the tokenizer; None takes `model`.
        dtype: Type of the stored weights.
        max_shard_size: Largest safetensors file.
        adapter_only: Write the LoRA adapter as peft reads it, not merged.

    Raises:
        UserError: there is no checkpoint in `path`, or it holds an adapter of another model than `model`;
            or none, where it is asked for.
        CorruptError: the checkpoint is damaged.
        InfraError: the directory cannot be written; nothing of it is left.
    """
    if not (path / "state.json").is_file():
        good = checkpoint.newest(path)
        if good is None:
            raise UserError(
                f"no checkpoint in {path}: want a directory named step-…, or one that holds some"
            )
        path = good[0]
    else:
        checkpoint.read_state(path)
    world = World.start("cpu")
    try:
        adapter = checkpoint.peek(path).adapter or {}
        settings = {key: value for key, value in adapter.items() if key != "base"}
        config = ModelConfig.model_validate({"path": model, **settings})
        policy = build_policy(open_hf(model), world, config)
        checkpoint.load(path, policy)
        beside = tokenizer or model
        if adapter_only:
            return export_adapter(policy, world, target, config, tokenizer=beside, dtype=dtype)
        return export_policy(
            policy, world, target, tokenizer=beside, dtype=dtype, max_shard_size=max_shard_size
        )
    except BaseException as error:
        shutil.rmtree(target.with_name(f".writing-{target.name}"), ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise InfraError(f"cannot export {target}: {error}") from error
        raise
    finally:
        world.close()
