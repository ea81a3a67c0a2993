"""LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): W + (α/r) B A, of which only A and B are trained.

peft puts the adapters into the model in place, so decoder and output embedding stay where the policy looks for them.
Whoever reads weights (the fleet, an export) sees them merged, under the names that they have without an adapter.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from meshrl.contract.errors import UserError
from meshrl.contract.nouns import Json
from meshrl.trainer.config import ModelConfig

LoraLayer: TypeAlias = Any
"""A `peft.tuners.lora.LoraLayer`."""
NAME = "default"
"""Of the one adapter, in peft's dictionaries."""
_BASE = ".base_layer."
_SEED = 0
"""A is drawn, B starts at 0: every rank must draw the same, and any draw starts from the same policy."""


def describe(config: ModelConfig) -> dict[str, Json] | None:
    """What a checkpoint says of the adapter that it holds; None for a model that is trained whole."""
    if not config.lora_rank:
        return None
    targets = config.target_modules
    return {
        "lora_rank": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
    }


def add_adapter(hf: nn.Module, config: ModelConfig) -> None:
    """Freeze `hf` and put trainable adapters beside its target modules, in place.

    Raises:
        UserError: a target that the model has not, or one whose weight the trainer reads past its forward.
    """
    from peft import LoraConfig, inject_adapter_in_model  # a second that other runs need not spend

    targets = config.target_modules
    wanted = targets if isinstance(targets, str) else list(targets)
    lora = LoraConfig(
        r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=wanted, lora_dropout=0.0
    )
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # Of tied embeddings: those are refused below.
            warnings.simplefilter("ignore", UserWarning)
            torch.manual_seed(_SEED)
            inject_adapter_in_model(lora, hf, adapter_name=NAME)
    except ValueError as error:
        raise UserError(f"model.target_modules: {str(error).splitlines()[0]}") from error
    for embedding in (hf.get_input_embeddings(), hf.get_output_embeddings()):  # type: ignore[operator]
        if hasattr(embedding, "lora_A"):
            raise UserError(
                "model.target_modules: adapters on the input or output embedding are not supported;"
                " name other modules, or all-linear"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A tensor of the model as others see it: with its adapter merged, whole rather than sharded."""

    parameter: nn.Parameter
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
            value = value + _delta(self.adapter)
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


def _delta(layer: LoraLayer) -> torch.Tensor:
    """(α/r) B A: float32[out, in], sharded as B is."""
    a, b = layer.lora_A[NAME].weight.detach(), layer.lora_B[NAME].weight.detach()
    if isinstance(a, DTensor):
        a = a.redistribute(placements=[Replicate()] * a.device_mesh.ndim)
    delta: torch.Tensor = layer.scaling[NAME] * (b @ a)
    return delta
