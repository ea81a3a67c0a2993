"""LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): W + s B A, of which only A and B are trained; s = α/r.

DoRA (Liu et al. 2024, https://arxiv.org/abs/2402.09353, equation 5) trains the norm of each row of that, too.

peft puts the adapters into the model in place, so decoder and output embedding stay where the policy looks for them.
An export, and every engine, has them merged, under the names that they have without an adapter. What travels to the
fleet is A and B alone: `merged` gives the same bits wherever it is computed. Of DoRA it is the merged weights.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from meshrl.contract.errors import UserError
from meshrl.contract.types import Json
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model.vision import tower_of, tower_prefix

LoraLayer: TypeAlias = Any
"""A `peft.tuners.lora.LoraLayer`."""
NAME = "default"
"""Name of the one adapter, in peft's dictionaries."""
SETTINGS_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
"""Files of a directory of peft's."""
PREFIX = "base_model.model."
"""Prefix of a tensor's name there."""
_BASE = ".base_layer."
_MAGNITUDE = "lora_magnitude_vector"
_MLP = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate"}
"""Names that peft gives to experts."""
_CELLS = 1 << 18
"""Elements of a matrix that are merged at once: the partial sums stay in a core's cache."""
_SEED = 0
"""A is drawn, B starts at 0: every rank must draw the same, and any draw starts from the same policy."""


def describe(config: ModelConfig, base: str | None) -> dict[str, Json]:
    """The description of an adapter in its checkpoint; `base` is the fingerprint of its base model."""
    described: dict[str, Json] = {
        "lora_rank": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "target_modules": _listed(config.target_modules),
        "base": base,
    }
    if config.use_rslora:
        described["use_rslora"] = True
    if config.use_dora:
        described["use_dora"] = True
    if config.exclude_modules:
        described["exclude_modules"] = _listed(config.exclude_modules)
    return described


def _listed(modules: str | Sequence[str]) -> Json:
    return modules if isinstance(modules, str) else sorted(modules)


def add_adapter(hf: nn.Module, config: ModelConfig) -> None:
    """Freeze `hf` and put trainable adapters beside its target modules, in place.

    Raises:
        UserError: a target that the model has not, or one whose weight the trainer reads past its forward; an adapter
            to start from that is not of this form.
    """
    # A second that other runs need not spend.
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora.layer import ParamWrapper

    excluded = _excluded_modules(hf, config)
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        target_modules=_target_modules(hf, config),
        exclude_modules=(excluded if isinstance(excluded, str) else list(excluded)) or None,
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
    if config.lora_adapter_path is not None:
        given = _given(config.lora_adapter_path, hf, config)
        for name, weight in adapters(hf):
            with torch.no_grad():
                weight.parameter.copy_(given[name])


def _excluded_modules(hf: Any, config: ModelConfig) -> str | tuple[str, ...]:
    """`model.exclude_modules`, and every module of a vision tower that is left as it is."""
    given, tower = config.exclude_modules, tower_of(hf)
    if tower is None or not config.freeze_vision_tower:
        return given
    if isinstance(given, str):
        return rf"(?:{given})|{re.escape(tower_prefix(hf))}.*"
    names = (name for name, _ in tower.named_modules() if name)
    return (*given, *(tower_prefix(hf) + name for name in names))


def place_adapters(
    hf: nn.Module, config: ModelConfig, place: Callable[[torch.Tensor, torch.Tensor], nn.Parameter]
) -> None:
    """Give adapters that have no values theirs, in place: A drawn and B 0, or what the recipe starts from.

    The norms of DoRA wait for `place_magnitudes`.

    Args:
        hf: Model with adapters on the meta device.
        config: Start of the adapters.
        place: The parameter to have instead of the first tensor, with the values of the second one.
    """
    source = config.lora_adapter_path
    given = None if source is None else _given(source, hf, config)
    draws = torch.Generator().manual_seed(_SEED)
    for name, module in hf.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        for part, linear in (("A", module.lora_A[NAME]), ("B", module.lora_B[NAME])):
            whole = torch.zeros(linear.weight.shape)
            if given is not None:
                whole = given[f"{name}.lora_{part}.weight"].float()
            elif part == "A":  # as peft draws it
                nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=draws)
            linear.weight = place(linear.weight, whole)


def place_magnitudes(
    hf: nn.Module, config: ModelConfig, place: Callable[[torch.Tensor, torch.Tensor], nn.Parameter]
) -> None:
    """Give DoRA's norms their values, in place: those of the weights, or what the recipe starts from.

    Arguments as of `place_adapters`.
    """
    source = config.lora_adapter_path
    given = None if source is None else _given(source, hf, config)
    for name, module in hf.named_modules():
        magnitude = _magnitude(module)
        if magnitude is None or module.base_layer.weight.is_meta:  # the checkpoint lacks it
            continue
        if given is not None:
            whole = given[f"{name}.{_MAGNITUDE}"].float()
        else:
            norms = module.base_layer.weight.detach().float().norm(dim=1)
            whole = norms.full_tensor() if isinstance(norms, DTensor) else norms
        magnitude.weight = place(magnitude.weight, whole)


def _magnitude(module: Any) -> Any:
    """Holder of the norms float32[out], as `weight`, of a module with an adapter; None without DoRA."""
    found = getattr(module, _MAGNITUDE, None)
    return found[NAME] if found else None


def _given(path: Path, hf: nn.Module, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Tensors of a directory of peft's, under the names of `adapters`. Raises UserError: it is of another form."""
    at = f"model.lora_adapter_path: {path}"
    try:
        if problem := config.adapter_mismatch(json.loads((path / SETTINGS_FILE).read_text())):
            raise UserError(problem)
        stored = load_file(path / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{at}: unreadable: {error}") from error
    given = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}
    own = {name: weight.parameter for name, weight in adapters(hf)}
    for name in sorted(given.keys() ^ own.keys()):
        has, wants = ("has", "lacks it") if name in given else ("lacks", "has it")
        raise UserError(
            f"{at} {has} {name}, and the recipe {wants}: want the adapter's own target_modules"
        )
    for name, parameter in own.items():
        if given[name].shape != parameter.shape:
            shapes = f"{list(given[name].shape)}, and the model wants {list(parameter.shape)}"
            raise UserError(f"{at}: {name} is {shapes}: it is of another model")
    return given


def peft_settings(config: ModelConfig, hf: nn.Module) -> dict[str, Json]:
    """The adapter's config for peft, of a model with adapters in place."""
    from peft import LoraConfig

    found = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        target_modules=list(targets(hf)),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(config.path),
        inference_mode=True,
    ).to_dict()  # type: ignore[no-untyped-call]
    return {key: sorted(v) if isinstance(v, set) else v for key, v in found.items()}


def _target_modules(hf: nn.Module, config: ModelConfig) -> str | list[str]:
    """The target modules for peft; for a mixture of experts, `all-linear` is every linear layer outside MLPs.

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
        """Shape of the whole tensor."""
        return tuple(self.parameter.shape)

    @torch.no_grad()
    def shared(self, dtype: torch.dtype) -> torch.Tensor:
        """The tensor as `dtype`, sharded as the parameter is. Every rank calls this."""
        value: torch.Tensor = self.parameter.detach()
        if self.adapter is not None:
            value = _with_adapter(value, self.adapter)
        return value.to(dtype)

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """The tensor as `dtype`. Every rank calls this; shards are cast before they are gathered: half the bytes."""
        value = self.shared(dtype)
        return value.full_tensor() if isinstance(value, DTensor) else value


def weights(hf: nn.Module) -> Iterator[tuple[str, Weight]]:
    """Hugging Face names and weights in layer order; a tied tensor comes once, under its first name."""
    adapted = {name: module for name, module in hf.named_modules() if hasattr(module, "lora_A")}
    for name, parameter in hf.named_parameters():
        if ".lora_" in name:
            continue
        owner, base, kind = name.partition(_BASE)
        if not base:
            yield name, Weight(parameter)
        else:
            yield f"{owner}.{kind}", Weight(parameter, adapted[owner] if kind == "weight" else None)


def adapters(hf: nn.Module) -> Iterator[tuple[str, Weight]]:
    """A and B of each target, `<module>.lora_A.weight` and `<module>.lora_B.weight`, in layer order; DoRA's norms."""
    for name, module in hf.named_modules():
        if hasattr(module, "lora_A"):
            yield f"{name}.lora_A.weight", Weight(module.lora_A[NAME].weight)
            yield f"{name}.lora_B.weight", Weight(module.lora_B[NAME].weight)
            if (magnitude := _magnitude(module)) is not None:
                yield f"{name}.{_MAGNITUDE}", Weight(magnitude.weight)


def scale(hf: nn.Module) -> float:
    """Factor of every adapter."""
    layers: Iterator[LoraLayer] = (m for m in hf.modules() if hasattr(m, "lora_A"))
    return float(next(layers).scaling[NAME])


def base_names(hf: nn.Module) -> dict[str, str]:
    """Maps names of parameters with an adapter to their names without one."""
    names = (name for name, _ in hf.named_parameters())
    return {name: name.replace(_BASE, ".") for name in names if _BASE in name}


def targets(hf: nn.Module) -> tuple[str, ...]:
    """Modules that have an adapter, in layer order."""
    return tuple(name for name, module in hf.named_modules() if hasattr(module, "lora_A"))


def merged(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rank: int, scale: float
) -> torch.Tensor:
    """W + s B A, of float32[out, in], float32[r, in] and float32[out, r].

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
        delta.mul_(scale).add_(weight[some])
    return merged


def _with_adapter(weight: torch.Tensor, layer: LoraLayer) -> torch.Tensor:
    """`merged`, sharded as the weight is: by rows; with DoRA's norms."""
    a, b = layer.lora_A[NAME].weight.detach(), layer.lora_B[NAME].weight.detach()
    rank, scale, magnitude = layer.r[NAME], layer.scaling[NAME], _magnitude(layer)
    rows = weight
    if isinstance(weight, DTensor):
        rows, a, b = weight.to_local(), a.full_tensor(), b.to_local()
    local = merged(rows, a, b, rank, scale)
    if magnitude is not None:
        norms = magnitude.weight.detach()
        norms = norms.to_local() if isinstance(norms, DTensor) else norms
        local.mul_((norms / local.norm(dim=1))[:, None])
    if not isinstance(weight, DTensor):
        return local
    return DTensor.from_local(
        local,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


class BaseModel:
    """The base checkpoint of an adapter: its safetensors, mapped, not loaded.

    Both ends of the weight plane have it on disk. A replica that merges an adapter into another one would serve a
    policy that nobody trained, so the fingerprint is sent with every adapter and is in every checkpoint of one.
    """

    def __init__(self, path: Path) -> None:
        """Read the headers.

        Raises:
            UserError: there are no safetensors in `path`, or they cannot be read.
        """
        self.path = path
        self._file_of: dict[str, Any] = {}
        try:
            for file in _files(path):
                opened: Any = safe_open(file, framework="pt")
                self._file_of |= dict.fromkeys(opened.keys(), opened)
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise UserError(f"{path}: unreadable weights: {error}") from error

    @cached_property
    def fingerprint(self) -> str:
        """xxh3-128, hexadecimal, over names, types, shapes and bytes of all tensors, in order of their names.

        How the tensors are sharded over files does not matter. Reads every byte once.
        """
        digest = xxhash.xxh3_128()
        for name in sorted(self._file_of):
            tensor = self.tensor(name)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @property
    def names(self) -> frozenset[str]:
        """Names of its tensors."""
        return frozenset(self._file_of)

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the files have a tensor of this name and shape."""
        file = self._file_of.get(name)
        return file is not None and tuple(file.get_slice(name).get_shape()) == shape

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as it is stored. Raises KeyError."""
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def slice(self, name: str) -> Any:
        """The tensor, of which only what is indexed is read. Raises KeyError."""
        return self._file_of[name].get_slice(name)


def _files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return [path / "model.safetensors"]
    return [
        path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))
    ]
