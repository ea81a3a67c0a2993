"""The optimizer: AdamW, or Muon on hidden matrices with AdamW on the rest; a schedule that is a pure function."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshrl.trainer.learner.optimizer_config import OptimConfig


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The learning rate of training step `step`, counted from 0.

    Warm-up rises linearly to `lr` over `lr_warmup_steps`; then constant, or cosine / linear down to
    `lr * min_lr_ratio` at `lr_decay_steps`, or `total_steps`. A pure function, so a checkpoint holds no scheduler.
    """
    if step < config.lr_warmup_steps:
        risen, start = (step + 1) / config.lr_warmup_steps, config.lr_warmup_init_ratio
        return config.lr * (start + (1.0 - start) * risen)
    if config.lr_scheduler_type == "constant":
        return config.lr
    span = max(1, (config.lr_decay_steps or total_steps) - config.lr_warmup_steps)
    done = min(1.0, (step - config.lr_warmup_steps) / span)
    fall = (
        1.0 - done if config.lr_scheduler_type == "linear" else (1 + math.cos(math.pi * done)) / 2
    )
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * fall)


class Optimizers:
    """The optimizers of a model, stepped as one."""

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        self._model = model
        self._config = config
        hidden, rest = _split(model) if config.name == "muon" else ([], _trained(model))
        self.parts: list[torch.optim.Optimizer] = []
        if hidden:
            # match_rms_adamw scales Muon's update to AdamW's size, so that one `lr` serves both.
            muon = torch.optim.Muon(
                hidden,
                lr=config.lr,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
            self.parts.append(muon)
        if rest:
            adamw = torch.optim.AdamW(
                rest,
                lr=config.lr,
                betas=config.betas,
                eps=config.eps,
                weight_decay=config.weight_decay,
                fused=fused({parameter.device.type for parameter in rest}),
            )
            keep_own_kernel(adamw)
            self.parts.append(adamw)
        self.offloaded = config.offload
        """Moments are on the host between two steps."""
        if config.offload:
            for part in self.parts:
                _offload_between_steps(part)

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def start_states(self) -> None:
        """Make the states that a first step would make; weights and gradients stay as they are.

        DCP does so by a step with a gradient of zeros for all parameters at once, which takes as much memory as the
        model again. One parameter after the other, it is that of the largest. Not where each step moves all states.
        """
        for part in () if self.offloaded else self.parts:
            for group in () if part.state else part.param_groups:
                rate, group["lr"] = group["lr"], 0.0
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
                    part.step()
                    parameter.grad = None
                group["lr"] = rate

    def step(self, rate: float) -> float:
        """Clip, update with learning rate `rate`, clear the gradients; returns the gradient norm.

        With a gradient that is not finite the weights stay as they are: one bad batch must not end the model.
        """
        norm = clip(self._model.parameters(), self._config.clip_grad)
        if math.isfinite(norm):
            for part in self.parts:
                for group in part.param_groups:
                    group["lr"] = rate
                part.step()
        self.zero_grad()
        return norm


def clip(parameters: Iterable[nn.Parameter], most: float) -> float:
    """Scale gradients so that their norm, over all of them, is at most `most`; returns what it was.

    With expert parallelism the gradients lie on two meshes, over which torch computes no norm: it is put together.
    """
    meshes: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            meshes.setdefault(mesh, []).append(parameter)
    if len(meshes) < 2:
        return _whole(nn.utils.clip_grad_norm_(itertools.chain(*meshes.values()), most))
    gradients = [[p.grad for p in members if p.grad is not None] for members in meshes.values()]
    norm = math.hypot(*(_whole(nn.utils.get_total_norm(each)) for each in gradients))
    factor = most / (norm + 1e-6)
    for each in gradients if factor < 1.0 else ():
        torch._foreach_mul_(each, factor)
    return norm


def _whole(norm: torch.Tensor) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def fused(devices: Collection[str]) -> bool | None:
    """Whether AdamW runs in one kernel: on CUDA, where the alternative holds copies as large as the model.

    None leaves the choice to torch: on a CPU, where weights that are offloaded are too.
    """
    return True if set(devices) == {"cuda"} else None


def keep_own_kernel(adamw: torch.optim.AdamW) -> None:
    """Step as this process chose to, whatever the process did that saved the state."""
    own = adamw.param_groups[0]["fused"]

    def renamed(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "fused": own} for group in saved["param_groups"]]
        return {**saved, "param_groups": groups}

    adamw.register_load_state_dict_pre_hook(renamed)


def norms_of(what: str, norms: Sequence[float]) -> dict[str, float]:
    """Metrics of updates: mean gradient norm of those applied; number of those skipped as not finite."""
    finite = [norm for norm in norms if math.isfinite(norm)]
    return {
        f"{what}/grad_norm": sum(finite) / len(finite) if finite else math.nan,
        f"{what}/skipped_updates": len(norms) - len(finite),
    }


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A model that is trained beside the policy: part of a checkpoint."""

    model: nn.Module
    optimizers: Optimizers


def _trained(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that are not frozen: with LoRA, the adapters."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _offload_between_steps(part: torch.optim.Optimizer) -> None:
    """Register as hooks, so that steps and states that DCP triggers are handled too."""
    part.register_step_pre_hook(lambda stepped, *_: move_state(stepped))
    part.register_step_post_hook(lambda stepped, *_: move_state(stepped, "cpu"))
    part.register_load_state_dict_post_hook(lambda loaded: move_state(loaded, "cpu"))


def move_state(part: torch.optim.Optimizer, device: str | None = None) -> None:
    """Bring the tensors of an optimizer's state to `device`, or to where each one's parameter is.

    The count of steps stays where AdamW keeps it.
    """
    for parameter, state in part.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name != "step":
                state[name] = value.to(device or parameter.device)


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Hidden matrices for Muon; embeddings, output, norms and biases for AdamW."""
    embeddings = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for p in module.parameters(recurse=False)
    }
    hidden: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        outside = id(parameter) in embeddings or "head" in name
        (hidden if parameter.ndim == 2 and not outside else rest).append(parameter)
    return hidden, rest
