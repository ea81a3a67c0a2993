"""Models sharded over the ranks by FSDP2, and their weights: each rank reads its own shards, into its device.

    a model on the meta device ──▶ spread, sharded ──▶ fill: safetensors' slices ──▶ shards

What tensors of a checkpoint become is transformers' own table (experts of a layer are one tensor, for example), and
where a shard lies is read off its parameter: FSDP, experts and tensors alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from meshrl.contract.errors import UserError
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model import attention, lora
from meshrl.trainer.model.lora import BaseModel
from meshrl.trainer.model.packing_check import HfModel
from meshrl.trainer.model.parallel import has_experts, share_matrices, spread_experts
from meshrl.trainer.model.untrainable import NO_SHARES
from meshrl.trainer.model.vision import tower_of, units_of
from meshrl.trainer.ranks.world import World

NEEDED = (5, 23)
"""Least version of transformers (major, minor): older ones have no reader of shards."""


_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"
"""transformers' own switch."""
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm")

Model = TypeVar("Model", bound=nn.Module)


def check_heads(hf: HfModel, world: World) -> None:
    """Raise UserError unless the ranks of a sequence group can share the heads that a rank has."""
    size = 1 if world.sequence is None else world.sequence.size
    tensor = 1 if world.tensor is None else world.tensor.size()
    heads = hf.config.get_text_config().num_attention_heads
    if heads % (size * tensor):
        beside = f" beside tensor: {tensor}" if tensor > 1 else ""
        raise UserError(
            f"model.ulysses_sequence_parallel_size: {size}{beside} does not divide"
            f" the model's {heads} attention heads"
        )


def shard(model: Model, hf: HfModel, world: World, config: ModelConfig) -> Model:
    """Make `model`, built around the decoder of `hf`, an FSDP2 module on the world's device."""
    tower = tower_of(hf)
    if config.freeze_vision_tower and tower is not None:
        tower.requires_grad_(False)
    if config.enable_gradient_checkpointing and not config.use_torch_compile:
        _recompute_activations(hf, keep_matmuls=config.keep_matmuls)
    compute = getattr(torch, config.param_dtype)
    how: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
    }
    if config.param_offload:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    if config.use_torch_compile:
        attention.keep_out_of_graphs(hf)
    if tower is not None and (world.tensor is not None or world.experts is not None):
        raise UserError(
            "trainer.parallel: a vision-language model is not sharded by tensor or expert; want 1"
        )
    shares = world.sequence is not None or world.tensor is not None
    if shares and any(map(attention.is_stateful, hf.modules())):
        raise UserError(f"trainer.parallel: {NO_SHARES}")
    if world.tensor is not None:
        if config.lora_rank:
            raise UserError("trainer.parallel.tensor: adapters are not shared among ranks; want 1")
        share_matrices(hf, world.tensor)
    if world.experts is not None and (has_experts(hf) or not world.experts_follow_tensor):
        spread_experts(hf, world.experts, world.tensor, **how)
    for layer in decoder_layers(hf):
        if config.use_torch_compile:
            _compile(layer, recompute=config.enable_gradient_checkpointing)
        fully_shard(layer, mesh=world.mesh, **how)
    for part in units_of(tower) if tower is not None else ():
        fully_shard(part, mesh=world.mesh, **how)
    fully_shard(model, mesh=world.mesh, **how)
    if is_empty(hf):
        fill(hf, model, config, torch.device("cpu") if config.param_offload else world.device)
    return _place_buffers(model, world) if config.param_offload else model.to(world.device)


def _compile(layer: nn.Module, *, recompute: bool) -> None:
    """Compile a layer for packs of any length; with `recompute`, what its graphs keep is computed again.

    The checkpoint is around the graphs, not in what is compiled, as transformers' is: there dynamo gives the layer up
    at the attention, which stays outside graphs, and compiles nothing of it.
    """
    if not recompute:
        layer.compile(dynamic=True)
        return
    inner: Any = torch.compile(layer.forward, dynamic=True)

    def forward(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*inputs, **named)
        return checkpoint(inner, *inputs, use_reentrant=False, **named)

    layer.forward = forward


def _place_buffers(model: Model, world: World) -> Model:
    """Buffers to the device; FSDP brings the offloaded parameters there, layer by layer."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(world.device))
    return model


def _recompute_activations(hf: HfModel, *, keep_matmuls: bool) -> None:
    how: dict[str, Any] = {"use_reentrant": False}  # FSDP2's hooks need the non-reentrant kind
    if keep_matmuls:
        how["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    if hasattr(hf, "activation_checkpointing_enable"):  # transformers >= 5.13
        hf.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def _keep_products(_: object, operation: Any, *inputs: object, **named: object) -> CheckpointPolicy:
    """Keep the results that take time: matrix products, and every kernel of attention."""
    name = operation.__name__.partition(".")[0]
    costly = name in _PRODUCTS or "attention" in name or "attn" in name
    return CheckpointPolicy.MUST_SAVE if costly else CheckpointPolicy.PREFER_RECOMPUTE


def decoder_layers(hf: HfModel) -> nn.ModuleList:
    """The blocks of the decoder.

    Raises:
        UserError: the architecture keeps them under a name we do not know.
    """
    decoder = hf.get_decoder()
    for name in ("layers", "h", "blocks"):
        layers = getattr(decoder, name, None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise UserError(f"{type(hf).__name__} has no list of decoder layers under a known name")


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
        config: Start of the adapters.
        device: Device of the shards.

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
    """Slices of the checkpoint for `model`, not read yet; those with an adapter by their names in `hf`."""
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
