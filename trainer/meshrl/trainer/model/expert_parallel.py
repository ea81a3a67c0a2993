"""Expert parallelism by `transformers.distributed`: each rank has whole experts, and tokens travel to them.

    a group of p ranks   rank 0: experts 0 … E/p - 1    …    rank p - 1: the last E/p    all-to-all there and back
    several groups       ranks with the same experts share them by FSDP; other weights are FSDP's over all ranks

Ranks of a group hold different tokens: shares of the rows, or with Ulysses of one row.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshrl.contract.errors import UserError

NEEDED = (5, 23)
"""Of transformers, whose interface is young."""
KEY = "trainer.parallel.expert"


def need_transformers(key: str, ranks: int) -> None:
    """Raise UserError where transformers cannot share a model among ranks."""
    installed = version("transformers")
    if tuple(map(int, installed.split(".")[:2])) < NEEDED:
        raise UserError(f"{key}: {ranks} needs transformers 5.23, and {installed} is installed")


def expert_plan(hf: Any) -> dict[str, str]:
    """What is done to which module or parameter of `hf`, in transformers' words."""
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
        UserError: transformers is too old, or cannot spread the experts of this model over so many ranks.
    """
    ranks = mesh["ep"].size()
    need_transformers(KEY, ranks)
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    plan = expert_plan(hf)
    modules = {name: m for name, m in hf.named_modules() if plan.get(name) == "ep_dispatch_experts"}
    if not modules:
        raise UserError(f"{KEY}: transformers has no plan to spread experts of {type(hf).__name__}")
    for experts in modules.values():
        if experts.num_experts % ranks:
            raise UserError(
                f"{KEY}: {ranks} does not divide the model's {experts.num_experts} experts"
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
    """What was gathered from the ranks is a view, which FSDP wants none of."""
    inner = experts.forward

    def forward(*inputs: Any) -> Any:
        return inner(*inputs).clone()

    experts.forward = forward


def _share(experts: nn.Module, mesh: DeviceMesh, batches: int, how: dict[str, Any]) -> None:
    """By FSDP, over the ranks that hold the same; gradients are means over `batches`, as those of other weights."""
    names = mesh.mesh_dim_names or ()
    holders = mesh["replicate", "efsdp"] if "replicate" in names else mesh["efsdp"]
    sharded: Any = fully_shard(experts, mesh=holders, **how)
    sharded.set_gradient_divide_factor(float(batches))
    if mesh["efsdp"].size() > 1:
        sharded.set_force_sum_reduction_for_comms(True)
