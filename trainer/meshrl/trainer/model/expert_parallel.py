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
GROUPS, EXPERTS = "efsdp", "ep"
"""Names of the mesh's dimensions."""


def spread_experts(hf: Any, mesh: DeviceMesh, **how: Any) -> None:
    """Leave each rank its experts of `hf`, in place; before FSDP takes the layers.

    Args:
        hf: A transformers model.
        mesh: Of all ranks, [GROUPS, EXPERTS].
        how: FSDP's options.

    Raises:
        UserError: transformers is too old, or cannot spread the experts of this model over so many ranks.
    """
    key, ranks = "trainer.parallel.expert", mesh[EXPERTS].size()
    installed = version("transformers")
    if tuple(map(int, installed.split(".")[:2])) < NEEDED:
        raise UserError(f"{key}: {ranks} needs transformers 5.23, and {installed} is installed")
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    plan = hf._expand_parallel_plan(dict(hf.ep_plan or {}))
    modules = {name: m for name, m in hf.named_modules() if plan.get(name) == "ep_dispatch_experts"}
    if not modules:
        raise UserError(f"{key}: transformers has no plan to spread experts of {type(hf).__name__}")
    for experts in modules.values():
        if experts.num_experts % ranks:
            raise UserError(
                f"{key}: {ranks} does not divide the model's {experts.num_experts} experts"
            )
    alone = init_device_mesh(mesh.device_type, (mesh.size(), 1), mesh_dim_names=("dp", "tp"))["tp"]
    apply_expert_parallelism(hf, mesh[EXPERTS], alone, plan)
    for experts in modules.values():
        _share(experts, mesh, how)


def _share(experts: nn.Module, mesh: DeviceMesh, how: dict[str, Any]) -> None:
    """By FSDP, over the ranks that hold the same; gradients are means over all ranks, as those of other weights."""
    sharded: Any = fully_shard(experts, mesh=mesh[GROUPS], **how)
    sharded.set_gradient_divide_factor(float(mesh.size()))
    if mesh[GROUPS].size() > 1:
        sharded.set_force_sum_reduction_for_comms(True)
