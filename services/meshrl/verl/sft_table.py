"""Rules for the keys of verl's SFT trainers, which become a recipe of `meshrl sft`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

from meshrl.contract.errors import MeshError
from meshrl.trainer.offline.config import SftConfig
from meshrl.verl import conversions as to
from meshrl.verl import names, sections
from meshrl.verl.rules import (
    Conversion,
    Given,
    KeyRule,
    as_list,
    configured,
    expanded,
    ignored,
    ignored_below,
    no,
    refused,
    rule,
    same,
    unless,
    unnamed,
    within,
)

BOOKKEEPING = "how verl saves, logs and profiles"
RANKS = "ranks: torchrun --nproc-per-node N -m meshrl.cli sft RECIPE"


@cache
def rules() -> tuple[KeyRule, ...]:
    """Every rule, in the order in which keys are reported and a recipe is written."""
    return (*_model(), *_data(), *_optimizer(), *_engine(), *_trainer())


def _model() -> Iterator[KeyRule]:
    for key in ("model.path", "model.partial_pretrain"):
        yield rule(key, to.model_path)
    yield rule("model.tokenizer_path", to.path_to("model.tokenizer_path"))
    yield same("model.enable_gradient_checkpointing", "model.enable_gradient_checkpointing", True)
    for name in ("lora_rank", "lora_alpha", "target_modules"):
        yield same(f"model.{name}", f"model.{name}")
    yield from sections.lora("model.lora")
    yield from sections.tokens_ahead("model.mtp")
    yield same("model.exclude_modules", "model.exclude_modules")
    yield rule("model.lora_adapter_path", to.path_to("model.lora_adapter_path"))
    for name in ("custom_chat_template", "external_lib", "hf_config_path"):
        yield refused(f"model.{name}", "put it into the checkpoint's own files")
    for name in ("override_config", "override_config.*"):
        yield refused(f"model.{name}", sections.MODEL_CHANGES)
    yield same("model.trust_remote_code", "model.trust_remote_code")
    speed = (
        "use_liger",
        "use_fused_kernels",
        "fused_kernel_options.impl_backend",
        "use_shm",
        "strategy",
    )
    memory = (
        "enable_activation_offload",
        "tiled_mlp.enabled",
        "tiled_mlp.num_shards",
        "use_remove_padding",
    )
    yield from ignored_below(
        "model", (*speed, *memory), "kernels and memory: the results are the same"
    )
    yield from ignored_below(
        "model.fsdp_config", (*names.FSDP, "cpu_offload", "offload_params"), sections.SPEED
    )
    yield ignored("use_remove_padding", "rows are packed always")
    yield unnamed("model")


def _data() -> Iterator[KeyRule]:
    yield rule("data.train_files", to.files_to("train_files"), "~/data/gsm8k/train.parquet")
    yield rule("data.val_files", to.files_to("val_files"))
    yield same("data.train_batch_size", "batch_rows", 256)
    yield rule("data.max_token_len_per_gpu", _tokens(dynamic=True), 8192)
    yield rule("data.micro_batch_size_per_gpu", _tokens(dynamic=False), 4)
    yield within("data.micro_batch_size", "see micro_batch_size_per_gpu")
    yield within("data.use_dynamic_bsz", "rows are packed to a token budget", True)
    yield same("data.max_length", "max_length", 1024)
    yield rule(
        "data.truncation",
        to.only(
            "error", None, note="a longer row is an error", instead="cut or drop long rows before"
        ),
    )
    yield refused("data.train_max_samples", "cut the file to that many rows", (None, -1), -1)
    yield rule("data.val_max_samples", _samples)
    for at in ("data", "data.multiturn"):
        for name in ("messages_key", "tools_key", "enable_thinking_key"):
            yield rule(f"{at}.{name}", _column(name))
    yield within("data.multiturn.enable", "the columns decide")
    for name in ("prompt_key", "response_key"):
        yield same(f"data.{name}", name)
    for name in ("prompt_dict_keys", "response_dict_keys"):
        yield refused(f"data.{name}", "columns of text are wanted: make them before", (None, []))
    yield refused(
        "data.enable_thinking_default", "data.apply_chat_template_kwargs", (None, "none"), "none"
    )
    yield rule("data.apply_chat_template_kwargs", _column("apply_chat_template_kwargs"))
    yield rule("data.apply_chat_template_kwargs.*", _column("apply_chat_template_kwargs"))
    for name in ("path", "name"):
        yield refused(f"data.custom_cls.{name}", "write the rows that it makes to a file")
    yield refused(
        "data.ignore_input_ids_mismatch",
        "a template that differs is an error",
        (None, False),
        False,
    )
    yield refused("data.chat_template", "put it into the checkpoint's own files")
    reading = ("pad_mode", "balance_dp_token", "use_shm", "num_workers")
    yield from ignored_below("data", reading, "how verl loads its data; the rows are the same")
    yield unnamed("data")


@configured
def _tokens(value: Any, given: Given, *, dynamic: bool) -> Conversion:
    packed = bool(given.get("data.use_dynamic_bsz"))
    if packed != dynamic:
        return Conversion(note="data.use_dynamic_bsz decides")
    longest = int(given.get("data.max_length"))
    tokens = int(value) if dynamic else int(value) * longest
    note = "" if dynamic else f"{value} rows x {longest} tokens (the same gradient for any split)"
    return Conversion(settings={"max_tokens_per_pack": max(tokens, longest)}, note=note)


def _samples(value: Any, given: Given) -> Conversion:
    if value is None or int(value) < 0:
        return Conversion(settings={"val_max_samples": 1_000_000}, note="all")
    return Conversion(settings={"val_max_samples": int(value)})


@configured
def _column(name: str, value: Any, given: Given) -> Conversion:
    """A column or an option that `meshrl sft` reads by the same name, where it does."""
    if value in (None, "", {}):
        return Conversion(note="none")
    if name in SftConfig.model_fields:
        return Conversion(settings={name: value})
    return no("rows have a prompt and a response: prompt_key, response_key")


def _optimizer() -> Iterator[KeyRule]:
    yield same("optim.lr", "optim.lr", 1e-3)
    yield same("optim.weight_decay", "optim.weight_decay", 0.01)
    yield same("optim.clip_grad", "optim.clip_grad", 1.0)
    yield rule("optim.betas", to.pair("optim.betas"))
    for name in ("eps", "min_lr_ratio"):
        yield same(f"optim.{name}", f"optim.{name}")
    yield rule("optim.lr_warmup_steps", to.warmup_steps("optim", "optim"))
    yield rule("optim.lr_warmup_steps_ratio", to.warmup_ratio("optim", "optim"))
    for name in ("lr_scheduler_type", "warmup_style", "lr_scheduler"):
        yield rule(f"optim.{name}", to.scheduler("optim"))
    yield refused("optim.num_cycles", "a cosine falls once", (None, 0.5), 0.5)
    yield ignored("optim.total_training_steps", "trainer.total_training_steps")
    yield from sections.optimizer("optim", "optim")
    yield unnamed("optim")


def _engine() -> Iterator[KeyRule]:
    """The section `engine` is one of verl's four; `engine=megatron` chooses it."""
    for key in ("engine", "model"):
        yield ignored(key, "a config group of verl's own")
    yield rule("optim", sections.schedule_of("optim"))
    for key in ("engine.ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size"):
        yield same(key, "model.ulysses_sequence_parallel_size")
    yield rule("engine.dtype", to.compute_type)
    yield same("engine.optimizer_offload", "optim.offload")
    yield same("engine.param_offload", "model.param_offload")
    every = {name for keys in names.ENGINES.values() for name in keys}
    yield from sections.engine("engine", tuple(sorted(every)))
    yield unnamed("engine")


def _trainer() -> Iterator[KeyRule]:
    yield rule("trainer.default_local_dir", to.path_to("output_dir"))
    yield same("trainer.total_training_steps", "steps")
    yield rule("trainer.total_epochs", _epochs, 4)
    yield same("trainer.seed", "seed", 1)
    yield rule("trainer.save_freq", _every("save_freq"))
    yield rule("trainer.test_freq", _every("test_freq"))
    yield rule("trainer.max_ckpt_to_keep", _kept)
    yield rule("trainer.resume_mode", _resume)
    yield rule(
        "trainer.device", to.only("cuda", "cpu", None, note="device: auto", instead="cuda or cpu")
    )
    for name in ("nnodes", "n_gpus_per_node"):
        yield within(f"trainer.{name}", RANKS)
    logs = ("project_name", "experiment_name", "logger", "balance_batch", "default_hdfs_dir")
    others = ("resume_from_path", "profile_interval", "nccl_timeout", "checkpoint.save_contents")
    yield from ignored_below("trainer", (*logs, *others, "checkpoint.load_contents"), BOOKKEEPING)
    yield from ignored_below("checkpoint", names.CHECKPOINT, BOOKKEEPING)
    yield from ignored_below("profiler", names.PROFILER, BOOKKEEPING)
    yield unless("enable", "profiler", "the profiler is off", "the profiler is not here")
    yield unnamed("trainer")


def _epochs(value: Any, given: Given) -> Conversion:
    """Epochs as steps, where the files are on this machine; otherwise nobody knows how many rows there are."""
    if "trainer.total_training_steps" in given:
        return Conversion(note="trainer.total_training_steps")
    rows = 0
    for path in as_list(given.get("data.train_files")):
        try:
            rows += _rows(expanded(path))
        except (ImportError, OSError, ValueError, MeshError):
            return no(f"set steps: {value} epochs of a file that cannot be read on this machine")
    batch = int(given.get("data.train_batch_size"))
    steps = max(1, int(value) * (rows // batch))
    return Conversion(settings={"steps": steps}, note=f"{value} epochs of {rows} rows / {batch}")


def _rows(path: str) -> int:
    import pyarrow.parquet as parquet

    count: int = parquet.ParquetFile(path).metadata.num_rows
    return count


@configured
def _every(ours: str, value: Any, given: Given) -> Conversion:
    """Steps between two; `after_each_epoch` is not known here."""
    if isinstance(value, int) and value > 0:
        return Conversion(settings={ours: value})
    if value in (None, -1, 0):
        return Conversion(note="at the end")
    return no(f"{ours} is a number of steps")


def _kept(value: Any, given: Given) -> Conversion:
    if value is None:
        return Conversion(settings={"max_ckpt_to_keep": 1_000_000}, note="all")
    return Conversion(settings={"max_ckpt_to_keep": math.ceil(value)})


def _resume(value: Any, given: Given) -> Conversion:
    if value in ("auto", "disable", None):
        return Conversion(settings={"resume_mode": value} if value else {})
    return no("resume_mode is auto or disable")
