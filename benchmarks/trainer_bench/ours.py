"""Our side: `Learner.learn`, all of it, from fetched rows to metrics."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
from work import CLIP_HIGH, CLIP_LOW, DUAL_CLIP, GROUP, LEARNING_RATE, Work

from meshrl.contract.types import Batch, BatchRow, Outcome, Trajectory, Uid, Version, VersionSpan
from meshrl.trainer.config import ActorConfig, AlgorithmConfig, ModelConfig
from meshrl.trainer.learner.learner import Learner, StepSettings
from meshrl.trainer.learner.optimizer import Optimizers
from meshrl.trainer.learner.optimizer_config import OptimConfig
from meshrl.trainer.learner.policy_gradient import PolicyGradient
from meshrl.trainer.model.policy import build_policy, open_hf
from meshrl.trainer.ranks.world import World

NOW = Version(1, 0)
MAX_TOKENS = 512
"""Tokens of a pack: on a CPU larger ones need more memory and are no faster."""


def learner_of(model: Path, work: Work, world: World) -> Learner:
    actor = ActorConfig(
        optim=OptimConfig(lr=LEARNING_RATE, weight_decay=0.0, clip_grad=1.0),
        clip_ratio_low=CLIP_LOW,
        clip_ratio_high=CLIP_HIGH,
        clip_ratio_c=DUAL_CLIP,
        ppo_max_token_len_per_gpu=MAX_TOKENS,
        recompute_old_log_probs=False,
    )
    policy = build_policy(open_hf(model), world, ModelConfig(path=model))
    return Learner(
        policy,
        Optimizers(policy, actor.optim),
        PolicyGradient(AlgorithmConfig(), actor, max_response_length=work.response),
        world,
        StepSettings(actor=actor),
    )


def rows_of(work: Work) -> list[Trajectory]:
    made = []
    for index, row in enumerate(work.batch()):
        prompt, length = len(row.prompt), len(row.prompt) + len(row.response)
        zeros = np.zeros(prompt, dtype=np.float32)
        made.append(
            Trajectory(
                uid=Uid("r", f"t{index // GROUP:03d}", index % GROUP),
                tokens=np.concatenate([row.prompt, row.response]),
                loss_mask=(np.arange(length) >= prompt).astype(np.uint8),
                rollout_logprobs=np.concatenate([zeros, row.old_logprobs]),
                spans=(VersionSpan(version=NOW, start=prompt, end=length),),
                reward=row.reward,
            )
        )
    return made


def batch_of(rows: list[Trajectory]) -> Batch:
    manifest = [
        BatchRow(
            uid=row.uid,
            group=row.uid.task,
            group_size=GROUP,
            num_tokens=len(row.tokens),
            oldest=NOW,
            newest=NOW,
            outcome=Outcome.OK,
        )
        for row in rows
    ]
    return Batch.of_rows(manifest, batch_id="b", run="r", step=0)


def main(order: dict[str, Any]) -> None:
    torch.set_num_threads(order["threads"])
    work, world = Work(**order["work"]), World.start("cpu")
    learner, rows = learner_of(Path(order["model"]), work, world), rows_of(work)
    by_uid, batch = {row.uid: row for row in rows}, batch_of(rows)
    count = itertools.count()

    def step() -> dict[str, float]:
        made = learner.schedule(batch)
        found = learner.learn(made, [by_uid[uid] for uid in made.uids(0)], next(count))
        return {name: float(found[f"actor/{name}"]) for name in ("loss", "grad_norm", "entropy")}

    print(json.dumps(measure.steps(step, order["steps"])))
    world.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
