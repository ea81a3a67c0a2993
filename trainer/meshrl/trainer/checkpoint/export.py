"""Hugging Face checkpoints out of a live model or a run's checkpoint, readable by any engine."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from meshrl.contract.errors import UserError
from meshrl.trainer.checkpoint import checkpoint
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.distributed import World
from meshrl.trainer.model.policy import Policy, build_policy, load_hf

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
        for pattern in TOKENIZER_FILES:
            for file in sorted(tokenizer.glob(pattern)):
                if file.is_file() and not (writing / file.name).exists():
                    shutil.copy2(file, writing / file.name)
        shutil.rmtree(target, ignore_errors=True)
        writing.rename(target)
    world.barrier()
    return target


def export_checkpoint(
    path: Path,
    target: Path,
    *,
    model: Path,
    tokenizer: Path | None = None,
    dtype: str = "float32",
    max_shard_size: str = MAX_SHARD_SIZE,
) -> Path:
    """Turn a checkpoint directory (or a run's directory of them: the newest) into a Hugging Face one.

    Args:
        path: `…/checkpoints/step-…` or `…/checkpoints`.
        target: The directory to make.
        model: The model that the run started from: its architecture, and with LoRA its weights, are read.
        tokenizer: Where the tokenizer is; None takes `model`.
        dtype: Type of the stored weights.
        max_shard_size: Largest safetensors file.

    Raises:
        UserError: there is no checkpoint in `path`, or it holds an adapter of another model than `model`.
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
        policy = build_policy(load_hf(model), world, config)
        checkpoint.load(path, policy)
        return export_policy(
            policy,
            world,
            target,
            tokenizer=tokenizer or model,
            dtype=dtype,
            max_shard_size=max_shard_size,
        )
    finally:
        world.close()
