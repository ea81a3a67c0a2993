"""Experts from the engine through worker and queue into the trainer, whose routers are others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch as pytorch

from meshrl.contract import rows
from meshrl.contract.types import RunSpec, SamplingParams, Task, Trajectory, Version, rollout_stage
from meshrl.rollout.config import CheckpointIntervals, RowSchedule
from meshrl.rollout.engines import torch
from meshrl.rollout.worker import RolloutWorker
from meshrl.trainer.model.packing import pack
from meshrl.trainer.model.policy import Policy, load_hf
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

from ..unit.rollout.checkpoints import make_model

RUN, GROUP, FIRST = "moe", 4, Version(1, 0)


class Words:
    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


async def sampled(model: Path, *, deterministic: bool) -> list[Trajectory]:
    """A group of rows as the trainer fetches them."""
    stage = rollout_stage(routed_experts=True)
    spec = RunSpec(run=RUN, group_size=GROUP, batch_groups=1, max_staleness=0, stages=(stage,))
    prompt = np.arange(3, 9, dtype=np.int32)
    sampling = SamplingParams(max_tokens=20)
    task = Task(run=RUN, task_id="t", prompt_ids=prompt, group_size=GROUP, sampling=sampling)
    queue = await TransferQueue.open(MemoryStore())
    await queue.open_run(spec)
    epoch = (await queue.acquire(RUN, "trainer")).epoch
    await queue.publish(RUN, FIRST)
    await queue.admit(RUN, [task], cursor="end", wait_s=5)
    await queue.close_feed(RUN)
    engine = torch.build({"device": "cpu", "eos_token_ids": []}, model=model, slots=GROUP)
    await engine.start()
    await engine.serve_checkpoint(FIRST)
    worker = RolloutWorker(
        queue, engine, Words(), runs=[RUN], worker="w", routed_experts=[RUN],
        schedule=RowSchedule(
            slots=GROUP, deterministic=deterministic, checkpoint=CheckpointIntervals(tokens=4)
        ),
    )  # fmt: skip
    working = asyncio.create_task(worker.run())
    taken = await queue.take(RUN, epoch=epoch, step=0, groups=1, batch_id="b", wait_s=120)
    worker.drain()
    await working
    uids = [row.uid for row in taken.rows]
    found = await queue.fetch_rows(RUN, uids, stage.writes)
    await engine.close()
    await queue.close()
    return [rows.trajectory(uid, columns) for uid, columns in zip(uids, found, strict=True)]


@pytest.mark.parametrize("deterministic", [False, True])
async def test_the_trainer_takes_the_engines_experts_whatever_its_routers_say(
    tmp_path: Path, deterministic: bool
) -> None:
    saved = make_model("Mixtral", num_local_experts=8, num_experts_per_tok=2)
    with pytorch.no_grad():
        # Scores that hardly differ: whichever experts are chosen, they have equal shares.
        for layer in saved.model.layers:
            layer.mlp.gate.weight.mul_(1e-3)
    saved.save_pretrained(tmp_path)
    group = await sampled(tmp_path, deterministic=deterministic)
    policy = Policy(load_hf(tmp_path))
    routing = policy.replay_routing()
    with pytorch.no_grad():
        pytorch.manual_seed(0)
        for layer in policy.hf.get_decoder().layers:
            weight = layer.mlp.gate.weight
            weight.copy_(pytorch.randn_like(weight) * weight.std())
        experts = [routing.of(row) for row in group]
        own = [np.zeros_like(each) for each in experts]
        starts = [row.prompt_length for row in group]
        logprobs = [
            policy(pack([row.tokens for row in group], starts, experts=given), 1.0)[0]
            for given in (experts, own)
        ]
    want = np.concatenate([row.rollout_logprobs[row.prompt_length :] for row in group])
    replayed, alone = (np.abs(each.numpy() - want).mean() for each in logprobs)
    assert replayed < alone / 20
