"""A process that trains a tiny model for two callers of its own, and prints each answer that they are told.

python -m tests.chaos.hosted_process FOLDER MODEL
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from pathlib import Path

import numpy as np
import torch

from meshrl.contract.codec import pack_training
from meshrl.contract.types import (
    AdamStep,
    CreateModel,
    Pass,
    SaveWeights,
    TrainingExample,
    TrainingRequest,
    TrainingVerb,
)
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.hosted.host import HostedTraining, HostingLimits
from meshrl.trainer.hosted.workbench import PolicyBench
from meshrl.trainer.ranks.world import World

STEPS = 12


def rows(seed: int) -> list[TrainingExample]:
    draw = np.random.default_rng(seed)
    found = []
    for length in draw.integers(4, 20, 4):
        tokens = draw.integers(0, 37, length + 1).astype(np.int32)
        inputs = {
            "target_tokens": tokens[1:].astype(np.int64),
            "logprobs": np.full(length, -3.6, np.float32),
            "advantages": draw.normal(0, 1, length).astype(np.float32),
        }
        found.append(TrainingExample(tokens=tokens[:-1], loss_inputs=inputs))
    return found


def script(rank: int | None) -> list[TrainingVerb]:
    verbs: list[TrainingVerb] = [CreateModel(base_model="tiny", lora_rank=rank)]
    for step in range(STEPS):
        verbs += [Pass(examples=rows(2 * step + part), loss="ppo") for part in range(2)]
        verbs.append(AdamStep(learning_rate=1e-2, weight_decay=0.01))
        if step % 5 == 4:
            verbs.append(SaveWeights(name=f"step-{step}"))
    return [*verbs, SaveWeights(name="sampler", for_sampler=True), SaveWeights(name="last")]


async def caller(host: HostedTraining, name: str, verbs: list[TrainingVerb]) -> None:
    requests = [TrainingRequest(model=name, number=n, verb=verb) for n, verb in enumerate(verbs)]
    for request in requests:
        await host.submit(request)
    for request in requests:
        answer = await host.result(name, request.number, wait_s=60)
        told = hashlib.sha256(pack_training(answer)).hexdigest()
        print(name, request.number, told, flush=True)


async def main(folder: Path, model: Path) -> None:
    torch.set_num_threads(1)
    world = World.start("cpu")
    bench = PolicyBench(ModelConfig(path=model), world)
    host = HostedTraining(folder, bench, limits=HostingLimits(snapshot_steps=4))
    await host.open()
    print("open", flush=True)
    await asyncio.gather(caller(host, "adapter", script(4)), caller(host, "whole", script(None)))
    await host.close()
    world.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
