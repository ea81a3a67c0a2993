"""Tokens, experts and matrices shared among ranks; the latter two by `transformers.distributed`.

    tokens     [H, P/s] ──all-to-all──▶ [H/s, P] ──attention──▶ [P, H/s] ──all-to-all──▶ [P/s, H]
    experts    rank 0: experts 0 … E/p - 1    …    rank p - 1: the last E/p    all-to-all there and back
               ranks with the same experts share them by FSDP; other weights are FSDP's over all ranks
    matrices   x ──▶ q, k, v, gate, up by columns ──▶ heads, width / t ──▶ o, down by rows ──▶ all-reduce ──▶ x

Ranks that share sequences (DeepSpeed-Ulysses, Jacobs et al. 2023, https://arxiv.org/abs/2309.14509) forward the same
pack, each a share of its tokens, and swap tokens for heads around attention. Log-probs are joined afterwards, so that
each rank computes the loss of the whole pack and differentiates its own share of it. Parameter gradients of a group's
ranks add up to the gradient. Ranks that share experts hold different tokens: shares of the rows, or with Ulysses of
one row. Ranks that share matrices forward the same tokens. Embeddings are shared by vocabulary; `logprob.py`
normalises over the shares. With both, experts stay whole: DCP cannot store a fused matrix of which each rank has two
pieces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshrl.contract.errors import UserError
from meshrl.trainer.model.untrainable import spread_fault

NEEDED = (5, 23)
"""Least version of transformers (major, minor), whose interface is young."""
EXPERT_KEY, TENSOR_KEY = "trainer.parallel.expert", "trainer.parallel.tensor"
_PARTIAL_GRADIENTS = "replicated_with_grad_allreduce"
"""transformers' name for weights that each rank has whole and uses for its heads only."""


def need_transformers(key: str, ranks: int) -> None:
    """Raise UserError where transformers cannot share a model among ranks."""
    installed = version("transformers")
    if tuple(map(int, installed.split(".")[:2])) < NEEDED:
        raise UserError(f"{key}: {ranks} needs transformers 5.23, and {installed} is installed")


def expert_plan(hf: Any) -> dict[str, str]:
    """Parallel style of modules and parameters of `hf` by name, in transformers' words."""
    plan: dict[str, str] = hf._expand_parallel_plan(dict(getattr(hf, "ep_plan", None) or {}))
    return plan


def has_experts(hf: Any) -> bool:
    """Whether transformers can spread experts of `hf`."""
    return "ep_dispatch_experts" in expert_plan(hf).values()


def spread_experts(hf: Any, mesh: DeviceMesh, tensor: DeviceMesh | None, **how: Any) -> None:
    """Leave each rank its experts of `hf`, in place; before FSDP takes the layers.

    Args:
        hf: A transformers model.
        mesh: `World.experts`.
        tensor: The ranks that forward the same tokens; None: each has its own.
        how: FSDP's options.

    Raises:
        UserError: transformers is too old, or cannot spread the experts of this model over these ranks.
    """
    ranks = mesh["ep"].size()
    need_transformers(EXPERT_KEY, ranks)
    if fault := spread_fault(hf.config.to_dict()):
        raise UserError(f"{EXPERT_KEY}: {fault}")
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    plan = expert_plan(hf)
    modules = {name: m for name, m in hf.named_modules() if plan.get(name) == "ep_dispatch_experts"}
    if not modules:
        raise UserError(
            f"{EXPERT_KEY}: transformers has no plan to spread experts of {type(hf).__name__}"
        )
    for experts in modules.values():
        if experts.num_experts % ranks:
            raise UserError(
                f"{EXPERT_KEY}: {ranks} does not divide the model's {experts.num_experts} experts"
            )
    if tensor is None:
        pairs = init_device_mesh(mesh.device_type, (mesh.size(), 1), mesh_dim_names=("dp", "tp"))
        tensor = pairs["tp"]
    apply_expert_parallelism(hf, mesh["ep"], tensor, plan)
    for experts in modules.values():
        if tensor.size() > 1:
            _own_output(experts)
        _share(experts, mesh, mesh.size() // tensor.size(), how)


def _own_output(experts: nn.Module) -> None:
    """Copy the output: gathered from the ranks it is a view, which FSDP does not accept."""
    inner = experts.forward

    def forward(*inputs: Any) -> Any:
        return inner(*inputs).clone()

    experts.forward = forward


def _share(experts: nn.Module, mesh: DeviceMesh, batches: int, how: dict[str, Any]) -> None:
    """Shard by FSDP over ranks with the same experts; gradients are means over `batches`, as elsewhere."""
    names = mesh.mesh_dim_names or ()
    holders = mesh["replicate", "efsdp"] if "replicate" in names else mesh["efsdp"]
    sharded: Any = fully_shard(experts, mesh=holders, **how)
    sharded.set_gradient_divide_factor(float(batches))
    if mesh["efsdp"].size() > 1:
        sharded.set_force_sum_reduction_for_comms(True)


def share_matrices(hf: Any, mesh: DeviceMesh) -> None:
    """Leave each rank its part of the matrices of `hf`, in place; before FSDP takes the layers.

    Args:
        hf: A transformers model.
        mesh: The ranks that share them.

    Raises:
        UserError: transformers is too old, or cannot share the layers of this model among these ranks.
    """
    need_transformers(TENSOR_KEY, mesh.size())
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    spread = expert_plan(hf)
    embeddings = {hf.get_input_embeddings(), hf.get_output_embeddings()}
    plan: dict[str, str] = hf._expand_parallel_plan(dict(hf.tp_plan or {}))
    plan = {name: style for name, style in plan.items() if not _below(name, spread)}
    outside = {name for name, module in hf.named_modules() if module in embeddings}
    if not spread and all(_below(name, outside) for name in plan):
        raise UserError(
            f"{TENSOR_KEY}: transformers has no plan to share layers of {type(hf).__name__}"
        )
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
            raise UserError(f"{TENSOR_KEY}: {size} does not divide the model's {what}, {heads}")


def _check_placed(name: str, parameter: torch.Tensor, mesh: DeviceMesh) -> None:
    if not isinstance(parameter, DTensor) or parameter.device_mesh != mesh:
        return
    (placement,) = parameter.placements
    if isinstance(placement, _StridedShard):
        raise UserError(
            f"{TENSOR_KEY}: {name} holds several matrices, which are not shared; want 1"
        )
    if isinstance(placement, Shard) and parameter.shape[placement.dim] % mesh.size():
        raise UserError(
            f"{TENSOR_KEY}: {mesh.size()} does not divide {name}, {list(parameter.shape)}"
        )


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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SequenceGroup:
    """The ranks that share packs with this one."""

    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SequenceShare:
    """This rank's part of one pack: `width` tokens, one after the other; the last shares end in padding."""

    among: SequenceGroup
    tokens: int
    """P: of the whole pack."""
    width: int
    """p = ⌈P/s⌉."""
    counts: tuple[int, ...]
    """Response tokens of each rank's share."""

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """[1, H, p, D], all heads of this share, to [1, H/s, P, D], this rank's heads of the pack."""
        _, heads, width, size = x.shape
        s = self.among.size
        parts = x.reshape(s, heads // s, width, size)
        swapped = _swap(parts, self.among.group).transpose(0, 1)
        return swapped.reshape(1, heads // s, s * width, size)[:, :, : self.tokens]

    def shares(self, x: torch.Tensor) -> torch.Tensor:
        """[1, P, H/s, D] to [1, p, H, D]: the inverse of `heads`, tokens first."""
        _, tokens, heads, size = x.shape
        s, width = self.among.size, self.width
        padded = F.pad(x, (0, 0, 0, 0, 0, s * width - tokens))
        swapped = _swap(padded.reshape(s, width, heads, size), self.among.group).transpose(0, 1)
        return swapped.reshape(1, width, s * heads, size)

    def joined(self, values: torch.Tensor) -> torch.Tensor:
        """[n, …] of this share's response tokens to [N, …] of the pack's; a rank's gradient is that of its part."""
        if not any(self.counts):
            return values
        joined: torch.Tensor = _Join.apply(values, self)  # type: ignore[no-untyped-call]
        return joined


def repeats(query_heads: int, key_heads: int, size: int) -> int:
    """How often each key head must come for `size` ranks to get equally many, each beside its query heads."""
    least = math.lcm(key_heads, size) // key_heads
    return least if query_heads % (key_heads * least) == 0 else query_heads // key_heads


def _swap(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Part i to rank i, and from it: [s, ...]."""
    swapped: torch.Tensor = _AllToAll.apply(parts, group)  # type: ignore[no-untyped-call]
    return swapped


class _AllToAll(torch.autograd.Function):
    """Its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


def _all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


class _Join(torch.autograd.Function):
    """All-gather of unequal parts; the gradient of what came from others is theirs to follow."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, share: SequenceShare) -> torch.Tensor:
        ctx.share = share
        longest = max(share.counts)
        own = F.pad(values, (0, 0) * (values.dim() - 1) + (0, longest - len(values)))
        parts = [torch.empty_like(own) for _ in share.counts]
        dist.all_gather(parts, own, group=share.among.group)
        return torch.cat([p[:n] for p, n in zip(parts, share.counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        counts, rank = ctx.share.counts, ctx.share.among.rank
        begin = sum(counts[:rank])
        return grads[0][begin : begin + counts[rank]], None
