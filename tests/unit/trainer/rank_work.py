"""Rows, a learner, and its training to checkpoints, by however many ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import numpy as np

from meshrl.contract.routed_experts import RoutedExperts
from meshrl.contract.types import (
    Batch,
    BatchRow,
    Outcome,
    Trajectory,
    Uid,
    Version,
    VersionSpan,
)
from meshrl.trainer.checkpoint import checkpoint
from meshrl.trainer.checkpoint.checkpoint import TrainerState
from meshrl.trainer.checkpoint.export import export_policy
from meshrl.trainer.config import ActorConfig, AlgorithmConfig, ModelConfig
from meshrl.trainer.learner.learner import Learner, RowContents, StepSettings
from meshrl.trainer.learner.optimizer import Optimizers
from meshrl.trainer.learner.policy_gradient import PolicyGradient
from meshrl.trainer.model.policy import Policy, build_policy, open_hf
from meshrl.trainer.model.vision import VisionReader
from meshrl.trainer.ranks.world import World

PROMPT = 3
VOCABULARY = 37
GROUPS, GROUP_SIZE = 5, 2


def trajectories() -> list[Trajectory]:
    """Ten rows of very different lengths, with a tool's tokens in some."""
    draw = np.random.default_rng(3)
    rows = []
    for index in range(GROUPS * GROUP_SIZE):
        length = int(draw.integers(PROMPT + 2, 40))
        mask = np.array([0] * PROMPT + [1] * (length - PROMPT), dtype=np.uint8)
        mask[PROMPT + 2 : PROMPT + 4] = index % 2
        rows.append(
            Trajectory(
                uid=Uid("r", f"t{index // GROUP_SIZE}", index % GROUP_SIZE),
                tokens=draw.integers(0, VOCABULARY, length).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=np.full(length, -3.5, dtype=np.float32),
                spans=(VersionSpan(version=Version(1, 0), start=PROMPT, end=length),),
                reward=float(draw.random()),
                reward_components={"a": float(index)},
            )
        )
    return rows


def batch(rows: list[Trajectory]) -> Batch:
    manifest = tuple(
        BatchRow(
            uid=row.uid, group=row.uid.task, group_size=GROUP_SIZE, num_tokens=len(row.tokens),
            oldest=Version(1, 0), newest=Version(1, 0), outcome=Outcome.OK,
        )
        for row in rows
    )  # fmt: skip
    return Batch.of_rows(manifest, batch_id="b", run="r", step=0)


def make(model: Path, world: World, **options: Any) -> Learner:
    # Plain gradients: with this eps AdamW's first update is lr · g, so weights show the gradient itself.
    plain = {"lr": 1e3, "eps": 1e3, "weight_decay": 0.0, "clip_grad": 1e9}
    policy = build_policy(open_hf(model), world, ModelConfig(path=model))
    return make_of(policy, world, **{"optim": plain, **options})


def make_of(
    policy: Policy,
    world: World,
    *,
    algorithm: dict[str, object] | None = None,
    routed_experts: bool = False,
    reader: VisionReader | None = None,
    **actor: object,
) -> Learner:
    config = ActorConfig.model_validate({"ppo_max_token_len_per_gpu": 64, **actor})
    return Learner(
        policy, Optimizers(policy, config.optim),
        PolicyGradient(
            AlgorithmConfig.model_validate(algorithm or {}), config, max_response_length=40
        ),
        world, StepSettings(actor=config),
        RowContents(routed_experts=routed_experts, reader=reader),
    )  # fmt: skip


def with_experts(rows: list[Trajectory]) -> list[Trajectory]:
    """Two of four experts in two layers for each token, at random; nobody knows those of the last one."""
    draw = np.random.default_rng(4)
    told = []
    for row in rows:
        pairs = draw.permuted(np.tile(np.arange(4), (len(row.tokens), 2, 1)), axis=-1)[..., :2]
        pairs[-1] = 0
        told.append(dataclasses.replace(row, routed_experts=RoutedExperts.pack(pairs)))
    return told


def taught(rows: list[Trajectory], top: int) -> list[Trajectory]:
    """What a teacher thinks likeliest at each place, at random; a prompt's first place has nothing before it."""
    draw = np.random.default_rng(5)
    told = []
    for row in rows:
        ids = draw.permuted(np.tile(np.arange(VOCABULARY), (len(row.tokens), 1)), axis=1)[:, :top]
        shares = draw.random((len(row.tokens), top + 1)) + 0.1
        logprobs = np.log(shares / shares.sum(1, keepdims=True))[:, :top]
        columns = {"ref_top_ids": ids.astype(np.int32)}
        columns["ref_top_logprobs"] = logprobs.astype(np.float32)
        columns["ref_logprobs"] = np.full(len(row.tokens), -3.0, dtype=np.float32)
        told.append(dataclasses.replace(row, **columns))
    return told


def train(
    model: Path, target: Path, world: World, rows_given: int, steps: int, top: int = 0
) -> list[float]:
    """Train up to `steps` steps, from the newest checkpoint in `target` on; save after each.

    With `top` a teacher's likeliest tokens are learned, beside rewards. Returns loss, gradient norm and entropy of
    the last step.
    """
    rows = trajectories()[:rows_given]
    mixture = "moe" in (model / "config.json").read_text()
    rows = with_experts(rows) if mixture else rows
    rows = taught(rows, top) if top else rows
    teaches = {"distillation": {"weight": 0.5, "top_k": top}} if top else {}
    learner = make(model, world, routed_experts=mixture, algorithm=teaches)
    by_uid = {row.uid: row for row in rows}
    good = checkpoint.newest(target / "checkpoints")
    state = TrainerState(run="r", step=0, epoch=1, seed=0, world_size=world.size, kl_coef=0.0)
    if good:
        state = checkpoint.load(good[0], learner.policy, learner.optimizers)
    for step in range(state.step, steps):
        made = learner.schedule(batch(rows))
        metrics = learner.learn(made, [by_uid[uid] for uid in made.uids(world.data_rank)], step)
        saved = dataclasses.replace(state, step=step + 1)
        checkpoint.save(
            target / "checkpoints", learner.policy, learner.optimizers, saved, world, keep=9
        )
    export_policy(learner.policy, world, target / "export", tokenizer=model)
    names = ("actor/loss", "actor/grad_norm", "actor/entropy")
    return [cast(float, metrics[name]) for name in names]
