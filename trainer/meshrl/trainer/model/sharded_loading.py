"""Weights of a checkpoint, read by those who need them: each rank reads its own shards, into its device.

    a model on the meta device ──▶ spread, sharded ──▶ fill: safetensors' slices ──▶ shards

What tensors of a checkpoint become is transformers' own table (experts of a layer are one tensor, for example), and
where a shard lies is read off its parameter: FSDP, experts and tensors alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from meshrl.contract.errors import UserError
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model import lora
from meshrl.trainer.model.base_model import BaseModel

NEEDED = (5, 23)
"""Of transformers: older ones have no reader of shards."""


_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"
"""transformers' own switch."""


def can_fill(path: Path) -> bool:
    """Whether `fill` reads the checkpoint in `path`; it does not read other formats than safetensors."""
    if tuple(map(int, version("transformers").split(".")[:2])) < NEEDED:
        return False
    try:
        BaseModel(path)
    except UserError:
        return False
    return True


def is_empty(hf: nn.Module) -> bool:
    """Whether a model has no weights yet."""
    return any(parameter.is_meta for parameter in hf.parameters())


@torch.no_grad()
def fill(hf: Any, model: nn.Module, config: ModelConfig, device: torch.device) -> None:
    """Give the parameters of `model` their values, in place; every rank calls this.

    Args:
        hf: The transformers model on the meta device that `model` is built around; its name is the checkpoint's
            directory. What `model` has not taken over of it stays empty.
        model: Sharded.
        config: Where adapters start.
        device: Of the shards.

    Raises:
        UserError: the checkpoint lacks a tensor, or has one of another shape.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    path, place = Path(hf.config.name_or_path), {"": device}
    lora.place_adapters(hf, config, lambda empty, whole: placed(empty, whole.to(device)))
    mapping: list[Any] = [*get_model_conversion_mapping(hf)]
    slices = _slices(hf, model, path, mapping)
    how = LoadStateDictConfig(
        device_map=place,
        dtype=hf.dtype,
        dtype_plan=hf._get_dtype_plan(hf.dtype),
        weight_mapping=mapping,
    )
    with _one_by_one() if any(p.ndim > 2 for p in model.parameters()) else nullcontext():
        found, _ = convert_and_load_state_dict_in_model(hf, slices, how)
    for name, stored, wanted in sorted(found.mismatched_keys):
        raise UserError(
            f"model.path: {path}: {name} is {list(stored)}, and config.json wants {list(wanted)}"
        )
    lora.place_magnitudes(hf, config, lambda empty, whole: placed(empty, whole.to(device)))
    hf.tie_weights(missing_keys=found.missing_keys, recompute_mapping=False)
    for name, empty in [(n, p) for n, p in model.named_parameters() if p.is_meta]:
        if not isinstance(empty, DTensor) or empty.to_local().numel():
            raise UserError(f"model.path: {path} has no weights for {name} of its architecture")
        # Of more ranks than experts this one has none: transformers, which merges experts, leaves it out.
        parameter = nn.Parameter(torch.empty_like(empty, device=device), empty.requires_grad)
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, parameter)
    hf._move_missing_keys_from_meta_to_device(set(), place, None, None)
    hf.initialize_weights()  # of what no checkpoint has, such as tables of positions


@contextmanager
def _one_by_one() -> Iterator[None]:
    """Read nothing ahead: of experts, threads would read all, before the first layer's become one tensor.

    A mixture of 55 million parameters took 372 MiB where its shard has 211, and takes 251 so.
    """
    before = os.environ.get(_NO_THREADS)
    os.environ[_NO_THREADS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_THREADS]
        else:
            os.environ[_NO_THREADS] = before


def placed(empty: torch.Tensor, whole: torch.Tensor) -> nn.Parameter:
    """A parameter with the values of `whole`, sharded as `empty` is."""
    if isinstance(empty, DTensor):
        whole = distribute_tensor(whole, empty.device_mesh, empty.placements, src_data_rank=None)
    parameter = nn.Parameter(whole, requires_grad=empty.requires_grad)
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' own mark
    return parameter


def _slices(hf: Any, model: nn.Module, path: Path, mapping: list[Any]) -> dict[str, Any]:
    """What the checkpoint has for `model`, not read yet; of a module with an adapter under its name there."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    base, adapted = BaseModel(path), lora.base_names(hf)
    ours = {id(parameter) for parameter in model.parameters()}
    named = dict(hf.named_parameters(remove_duplicate=False)) | dict(hf.named_buffers())
    plain = {adapted.get(name, name): tensor for name, tensor in named.items()}
    within = {own: name for name, own in adapted.items()}
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    found = {}
    for stored in sorted(base.names):
        name, pattern = rename_source_key(
            stored, renamings, converters, hf.base_model_prefix, plain
        )
        name = name if name in plain else stored
        tensor = plain.get(name)
        if isinstance(tensor, nn.Parameter) and id(tensor) not in ours:
            continue
        found[within.get(name, stored) if pattern is None else stored] = base.slice(stored)
    return found
