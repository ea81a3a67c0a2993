"""A model that is read by shards, compared with the whole, and exported: run as ranks by test_sharded_loading."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from meshrl.trainer.checkpoint import export
from meshrl.trainer.config import ModelConfig, ParallelConfig
from meshrl.trainer.distributed import World
from meshrl.trainer.model.critic import build_critic
from meshrl.trainer.model.policy import build_policy, load_hf, open_hf


def noted(file: Path, _: None) -> None:
    """Leave the number of the rank that has written a file beside it."""
    file.with_suffix(".rank").write_text(os.environ["RANK"])


def main(model: Path, parallel: str) -> None:
    torch.set_num_threads(1)
    world = World.start("cpu", ParallelConfig.model_validate_json(parallel))
    whole, empty = load_hf(model), open_hf(model)
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    policy = build_policy(empty, world, ModelConfig(path=model))
    own = dict(policy.hf.named_parameters()) | dict(policy.hf.named_buffers())
    stored = dict(whole.named_parameters()) | dict(whole.named_buffers())
    assert own.keys() == stored.keys()
    for name, tensor in stored.items():
        found = own[name].full_tensor() if isinstance(own[name], DTensor) else own[name]
        assert torch.equal(found, tensor), name
    critic = build_critic(open_hf(model), world, ModelConfig(path=model))
    assert not any(parameter.is_meta for parameter in critic.parameters())
    local = sum(p.to_local().numel() for p in policy.parameters() if isinstance(p, DTensor))
    print(world.rank, local, sum(parameter.numel() for parameter in whole.parameters()))
    export.SHARED_OUT = 1000
    export.save_file = lambda own, file, about: noted(file, save_file(own, file, about))
    export.export_policy(policy, world, model.with_name("export"), tokenizer=model)
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
