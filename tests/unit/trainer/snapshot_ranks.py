"""A snapshot by several ranks: collectives of its gather, and tensors that differ from what each gathers to alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.tensor.debug import CommDebugMode

from meshrl.contract.types import Version
from meshrl.trainer.config import ModelConfig, ParallelConfig
from meshrl.trainer.distributed import World
from meshrl.trainer.model.policy import build_policy, open_hf
from meshrl.trainer.model.snapshot import take_snapshot


def main() -> None:
    path, bucket_bytes = Path(sys.argv[1]), int(sys.argv[3])
    world = World.start("cpu", ParallelConfig.model_validate(json.loads(sys.argv[2])))
    policy = build_policy(open_hf(path), world, ModelConfig(path=path))
    with CommDebugMode() as one_by_one:
        alone = {name: weight.whole(torch.bfloat16) for name, weight in policy.published_weights()}
    with CommDebugMode() as together:
        sent = take_snapshot(
            policy,
            world,
            run="r",
            version=Version(1, 1),
            dtype="bfloat16",
            bucket_bytes=bucket_bytes,
        )
    if sent is not None:
        wrong, stored = 0, load_file(path / "model.safetensors")
        for spec in sent.manifest.tensors:
            held = sent.bucket(spec.bucket)[spec.offset : spec.offset + spec.nbytes].copy()
            found = torch.from_numpy(held).view(torch.bfloat16).view(spec.shape)
            wrong += not torch.equal(found, alone[spec.name])
            wrong += not torch.equal(found, stored.get(spec.name, found).to(found.dtype))
        buckets, counts = len(sent.manifest.bucket_bytes), (together, one_by_one)
        print(buckets, *(each.get_total_counts() for each in counts), wrong, len(alone))
    world.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
