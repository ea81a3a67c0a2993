"""Tensor parallelism by `transformers.distributed`: ranks share the matrices of each layer, and the vocabulary.

    x ──▶ q, k, v, gate, up by columns ──▶ heads, width / t ──▶ o, down by rows ──▶ all-reduce ──▶ x

Ranks of a group forward the same tokens. Embeddings are shared by vocabulary; `logprob.py` normalises over the
shares. Experts stay whole, and are shared out by `expert_parallel.py`: DCP cannot store a fused matrix of which each
rank has two pieces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshrl.contract.errors import UserError
from meshrl.trainer.model.expert_parallel import expert_plan, need_transformers

KEY = "trainer.parallel.tensor"
_PARTIAL_GRADIENTS = "replicated_with_grad_allreduce"
"""transformers' name for weights that each rank has whole and uses for its heads only."""


def share_matrices(hf: Any, mesh: DeviceMesh) -> None:
    """Leave each rank its part of the matrices of `hf`, in place; before FSDP takes the layers.

    Args:
        hf: A transformers model.
        mesh: Of the ranks that share them.

    Raises:
        UserError: transformers is too old, or cannot share the layers of this model among so many ranks.
    """
    need_transformers(KEY, mesh.size())
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    spread = expert_plan(hf)
    embeddings = {hf.get_input_embeddings(), hf.get_output_embeddings()}
    plan: dict[str, str] = hf._expand_parallel_plan(dict(hf.tp_plan or {}))
    plan = {name: style for name, style in plan.items() if not _below(name, spread)}
    outside = {name for name, module in hf.named_modules() if module in embeddings}
    if not spread and all(_below(name, outside) for name in plan):
        raise UserError(f"{KEY}: transformers has no plan to share layers of {type(hf).__name__}")
    _check_heads(hf, plan, mesh.size())
    if hf.config.get_text_config().vocab_size % mesh.size():  # each rank has it whole
        plan = {name: style for name, style in plan.items() if not _below(name, outside)}
    partial = [name for name, style in plan.items() if style == _PARTIAL_GRADIENTS]
    apply_tensor_parallelism(hf, mesh, {n: s for n, s in plan.items() if n not in partial})
    for name, module in hf.named_modules():
        if name in partial:
            _add_up_gradients(module, mesh)
    hf.tie_weights()
    for name, parameter in hf.named_parameters():
        _check_placed(name, parameter, mesh)


def _below(name: str, modules: Any) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _check_heads(hf: Any, plan: dict[str, str], size: int) -> None:
    config = hf.config.get_text_config()
    if not any(name.endswith("k_proj") and style == "colwise" for name, style in plan.items()):
        return
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, what, None) or config.num_attention_heads
        if heads % size:
            raise UserError(f"{KEY}: {size} does not divide the model's {what}, {heads}")


def _check_placed(name: str, parameter: torch.Tensor, mesh: DeviceMesh) -> None:
    if not isinstance(parameter, DTensor) or parameter.device_mesh != mesh:
        return
    (placement,) = parameter.placements
    if isinstance(placement, _StridedShard):
        raise UserError(f"{KEY}: {name} holds several matrices, which are not shared; want 1")
    if isinstance(placement, Shard) and parameter.shape[placement.dim] % mesh.size():
        raise UserError(f"{KEY}: {mesh.size()} does not divide {name}, {list(parameter.shape)}")


def _add_up_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the gradients of weights that each rank used for its heads only.

    transformers adds up what has been accumulated, after each backward pass, so that of the second micro-batch on
    gradients would count more than once.
    """
    from transformers.distributed.parallel_utils import _AllReduceBackward

    add_up: Any = _AllReduceBackward.apply  # of a value that ranks share, in its backward pass

    inner, group = module.forward, mesh.get_group()

    def forward(*inputs: Any, **named: Any) -> Any:
        own = dict(module._parameters)
        summed = {n: p if p is None else add_up(p, group) for n, p in own.items()}
        try:
            module._parameters.update(summed)
            return inner(*inputs, **named)
        finally:
            module._parameters.update(own)

    module.forward = forward
