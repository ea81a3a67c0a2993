"""A snapshot by two ranks: collectives of its gather, and tensors that differ from what each gathers to alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshrl.contract.types import Version
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.distributed import World
from meshrl.trainer.model.policy import build_policy, open_hf
from meshrl.trainer.model.snapshot import take_snapshot


def main() -> None:
    world = World.start("cpu")
    path = Path(sys.argv[1])
    policy = build_policy(open_hf(path), world, ModelConfig(path=path))
    alone = {name: weight.whole(torch.bfloat16) for name, weight in policy.published_weights()}
    collectives: list[int] = []
    gather: Any = dist.all_gather_into_tensor

    def counted(into: torch.Tensor, *args: Any, **options: Any) -> Any:
        collectives.append(into.numel())
        return gather(into, *args, **options)

    dist.all_gather_into_tensor = counted
    sent = take_snapshot(
        policy, world, run="r", version=Version(1, 1), dtype="bfloat16", bucket_bytes=1 << 13
    )
    if sent is not None:
        wrong = 0
        for spec in sent.manifest.tensors:
            held = sent.bucket(spec.bucket)[spec.offset : spec.offset + spec.nbytes].copy()
            found = torch.from_numpy(held).view(torch.bfloat16).view(spec.shape)
            wrong += not torch.equal(found, alone[spec.name])
        print(len(sent.manifest.bucket_bytes), len(collectives), wrong, len(alone))
    world.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
