"""LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): W + (α/r) B A, of which only A and B are trained.

peft puts the adapters into the model in place, so decoder and output embedding stay where the policy looks for them.
An export, and every engine, has them merged, under the names that they have without an adapter. What travels to the
fleet is A and B alone: `merged` gives the same bits wherever it is computed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshrl.contract.errors import UserError
from meshrl.contract.types import Json
from meshrl.trainer.config import ModelConfig

LoraLayer: TypeAlias = Any
"""A `peft.tuners.lora.LoraLayer`."""
NAME = "default"
"""Of the one adapter, in peft's dictionaries."""
_BASE = ".base_layer."
_MLP = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate"}
"""Names that peft gives to experts."""
_CELLS = 1 << 18
"""Of a matrix, merged at once: the partial sums stay in a core's cache."""
_SEED = 0
"""A is drawn, B starts at 0: every rank must draw the same, and any draw starts from the same policy."""


def describe(config: ModelConfig, base: str | None) -> dict[str, Json]:
    """The description of an adapter in its checkpoint; `base` is the fingerprint of its base model."""
    targets = config.target_modules
    return {
        "lora_rank": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
        "base": base,
    }


def add_adapter(hf: nn.Module, config: ModelConfig) -> None:
    """Freeze `hf` and put trainable adapters beside its target modules, in place.

    Raises:
        UserError: a target that the model has not, or one whose weight the trainer reads past its forward.
    """
    # A second that other runs need not spend.
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora.layer import ParamWrapper

    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=_target_modules(hf, config),
        lora_dropout=0.0,
    )
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # Of tied embeddings and of experts: those are refused below.
            warnings.simplefilter("ignore", UserWarning)
            warnings.simplefilter("ignore", RuntimeWarning)
            torch.manual_seed(_SEED)
            inject_adapter_in_model(lora, hf, adapter_name=NAME)
    except ValueError as error:
        raise UserError(f"model.target_modules: {str(error).splitlines()[0]}") from error
    for name, module in hf.named_modules():
        if isinstance(module, ParamWrapper):
            raise UserError(
                f"model.target_modules: adapters on {name}, whose experts share one tensor, are not supported;"
                " name modules of the attention, or all-linear"
            )
    for embedding in (hf.get_input_embeddings(), hf.get_output_embeddings()):  # type: ignore[operator]
        if hasattr(embedding, "lora_A"):
            raise UserError(
                "model.target_modules: adapters on the input or output embedding are not supported;"
                " name other modules, or all-linear"
            )


def _target_modules(hf: nn.Module, config: ModelConfig) -> str | list[str]:
    """As peft reads them; of a mixture of experts, `all-linear` is every linear layer that is no MLP's.

    peft would add the experts, which share one tensor here, and takes names of dense MLPs for theirs.
    """
    targets = config.target_modules
    if not isinstance(targets, str):
        return list(targets)
    if targets != "all-linear" or all(parameter.ndim < 3 for parameter in hf.parameters()):
        return targets
    head = hf.get_output_embeddings()  # type: ignore[operator]
    linear = {n for n, m in hf.named_modules() if isinstance(m, nn.Linear) and m is not head}
    return sorted({name.rpartition(".")[2] for name in linear} - _MLP)


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A tensor of the model as others see it: with its adapter merged, whole rather than sharded."""

    parameter: torch.Tensor
    adapter: LoraLayer | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self.parameter.shape)

    @torch.no_grad()
    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """The tensor as `dtype`. Every rank calls this; shards are cast before they are gathered: half the bytes."""
        value: torch.Tensor = self.parameter.detach()
        if self.adapter is not None:
            value = _with_adapter(value, self.adapter)
        value = value.to(dtype)
        return value.full_tensor() if isinstance(value, DTensor) else value


def weights(hf: nn.Module) -> Iterator[tuple[str, Weight]]:
    """Hugging Face names and weights in layer order; a tied tensor comes once, under its first name."""
    adapted = {name: module for name, module in hf.named_modules() if hasattr(module, "lora_A")}
    for name, parameter in hf.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            continue
        owner, base, kind = name.partition(_BASE)
        if not base:
            yield name, Weight(parameter)
        else:
            yield f"{owner}.{kind}", Weight(parameter, adapted[owner] if kind == "weight" else None)


def adapters(hf: nn.Module) -> Iterator[tuple[str, Weight]]:
    """A and B of each target, `<module>.lora_A.weight` and `<module>.lora_B.weight`, in layer order."""
    for name, module in hf.named_modules():
        if hasattr(module, "lora_A"):
            yield f"{name}.lora_A.weight", Weight(module.lora_A[NAME].weight)
            yield f"{name}.lora_B.weight", Weight(module.lora_B[NAME].weight)


def targets(hf: nn.Module) -> tuple[str, ...]:
    """Modules that have an adapter, in layer order."""
    return tuple(name for name, module in hf.named_modules() if hasattr(module, "lora_A"))


def merged(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rank: int, alpha: int
) -> torch.Tensor:
    """W + (α/r) B A, of float32[out, in], float32[r, in] and float32[out, r].

    Summed rank by rank, each product and each sum rounded by itself: unlike a matmul's, its bits do not depend on
    the device, the number of threads or how rows are sharded. It takes twice a matmul's time at r = 16.
    """
    merged = torch.empty_like(weight)
    rows = max(1, _CELLS // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        some = slice(start, start + rows)
        delta, part = merged[some], b[some]
        torch.mul(part[:, :1], a[:1], out=delta)
        product = torch.empty_like(delta)
        for index in range(1, rank):
            torch.mul(part[:, index : index + 1], a[index : index + 1], out=product)
            delta.add_(product)
        delta.mul_(alpha / rank).add_(weight[some])
    return merged


def _with_adapter(weight: torch.Tensor, layer: LoraLayer) -> torch.Tensor:
    """`merged`, sharded as the weight is: by rows."""
    a, b = layer.lora_A[NAME].weight.detach(), layer.lora_B[NAME].weight.detach()
    rank, alpha = layer.r[NAME], layer.lora_alpha[NAME]
    if not isinstance(weight, DTensor):
        return merged(weight, a, b, rank, alpha)
    local = merged(weight.to_local(), a.full_tensor(), b.to_local(), rank, alpha)
    return DTensor.from_local(
        local,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
