"""Hugging Face checkpoints out of a live model or a run's checkpoint, readable by any engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from meshrl.contract.errors import UserError
from meshrl.trainer.checkpoint import checkpoint
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.distributed import World
from meshrl.trainer.model import lora
from meshrl.trainer.model.policy import Policy, build_policy, open_hf

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)


MAX_SHARD_SIZE = "5GB"


def export_policy(
    policy: Policy,
    world: World,
    target: Path,
    *,
    tokenizer: Path,
    dtype: str = "float32",
    max_shard_size: str = MAX_SHARD_SIZE,
) -> Path:
    """Write config, safetensors and tokenizer files to `target`, replacing what is there; LoRA is merged.

    Every rank calls this. The directory appears by a rename, never half-written.

    Args:
        policy: The model.
        world: The ranks.
        target: The directory to make.
        tokenizer: Where to copy the tokenizer's files from.
        dtype: Type of the stored weights.
        max_shard_size: Largest safetensors file, such as `5GB`; a model that is larger gets several and an index.
    """
    kind = getattr(torch, dtype)
    full: dict[str, torch.Tensor] = {}
    for name, weight in policy.named_weights():
        tensor = weight.whole(kind)
        if world.is_main:
            full[name] = tensor.cpu().clone()
    if world.is_main:
        stored = policy.hf.state_dict().keys()
        full |= {n: b.detach().cpu() for n, b in policy.hf.named_buffers() if n in stored}
        writing = target.with_name(f".writing-{target.name}")
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        policy.hf.save_pretrained(writing, state_dict=full, max_shard_size=max_shard_size)
        _finish(writing, target, tokenizer)
    world.barrier()
    return target


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
    """With the tokenizer's files beside the weights, `writing` becomes `target`."""
    for pattern in TOKENIZER_FILES:
        for file in sorted(tokenizer.glob(pattern)):
            if file.is_file() and not (writing / file.name).exists():
                shutil.copy2(file, writing / file.name)
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
        tokenizer: Where the tokenizer is; None takes `model`.
        dtype: Type of the stored weights.
        max_shard_size: Largest safetensors file.
        adapter_only: Write the LoRA adapter as peft reads it, not merged.

    Raises:
        UserError: there is no checkpoint in `path`, or it holds an adapter of another model than `model`;
            or none, where it is asked for.
        CorruptError: the checkpoint is damaged.
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
    finally:
        world.close()
