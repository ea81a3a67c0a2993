"""Rows, a learner, and its training to checkpoints, by however many ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from meshrl.contract.routed_experts import RoutedExperts
from meshrl.contract.types import (
    Batch,
    BatchRow,
    Int32,
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
from meshrl.trainer.learner.experience import Schedule
from meshrl.trainer.learner.learner import Learned, Learner, RowContents, StepSettings
from meshrl.trainer.learner.optimizer import Optimizers
from meshrl.trainer.learner.optimizer_config import OptimConfig
from meshrl.trainer.learner.policy_gradient import PolicyGradient
from meshrl.trainer.model.packing import pack
from meshrl.trainer.model.policy import Policy, build_policy, open_hf
from meshrl.trainer.model.snapshot import WeightSnapshot, take_snapshot
from meshrl.trainer.model.vision import VisionReader
from meshrl.trainer.ranks.world import World
from tests.unit.trainer import tiny

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


def silent(row: Trajectory) -> Trajectory:
    """The row, had the policy said nothing."""
    columns = ("tokens", "loss_mask", "rollout_logprobs")
    cut: dict[str, Any] = {name: getattr(row, name)[:PROMPT] for name in columns}
    return dataclasses.replace(row, spans=(), **cut)


def manifest_row(uid: Uid, group_size: int, num_tokens: int, prompt: int = 0) -> BatchRow:
    return BatchRow(
        uid=uid, group=uid.task, group_size=group_size, num_tokens=num_tokens,
        oldest=Version(1, 0), newest=Version(1, 0), outcome=Outcome.OK, prompt_tokens=prompt,
    )  # fmt: skip


def batch_of(rows: Sequence[BatchRow]) -> Batch:
    return Batch.of_rows(tuple(rows), batch_id="b", run="r", step=0)


def batch(rows: Sequence[Trajectory]) -> Batch:
    return batch_of([manifest_row(row.uid, GROUP_SIZE, len(row.tokens)) for row in rows])


def own_rows(made: Schedule, rows: Sequence[Trajectory], rank: int = 0) -> list[Trajectory]:
    by_uid = {row.uid: row for row in rows}
    return [by_uid[uid] for uid in made.uids(rank)]


def learn(
    learner: Learner,
    rows: Sequence[Trajectory],
    step: int = 0,
    *,
    of: Batch | None = None,
    baselines: Mapping[str, float] | None = None,
    observe: Callable[[Learned], None] | None = None,
) -> dict[str, Any]:
    """One step; returns its metrics."""
    made = learner.schedule(of or batch(rows))
    own = own_rows(made, rows, learner.world.data_rank)
    return learner.learn(made, own, step, baselines, observe)


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {n: p.full_tensor().detach().clone() for n, p in policy.named_tensors()}  # type: ignore[attr-defined]


def exported(path: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path).state_dict())


def state(step: int, epoch: int = 1, **changes: Any) -> TrainerState:
    given = {"run": "r", "seed": 0, "world_size": 1, "kl_coef": 0.1, **changes}
    return TrainerState(step=step, epoch=epoch, **given)


def fresh(
    path: Path, world: World, optimizer: str = "adamw", **changes: Any
) -> tuple[Policy, Optimizers]:
    """A policy with an optimizer, and no algorithm."""
    config = ModelConfig.model_validate({"path": path, **changes})
    policy = build_policy(open_hf(path), world, config)
    return policy, Optimizers(policy, OptimConfig(name=optimizer, lr=1e-2))  # type: ignore[arg-type]


def nudge(policy: Policy, optimizers: Optimizers, seed: int, rate: float = 1e-2) -> None:
    """A step that makes some rows likelier."""
    rows = tiny.rows(4, seed=seed)
    logprobs, entropies = policy(pack(rows, [2] * 4), 1.0)
    (-logprobs.mean() - 0.1 * entropies.mean()).backward()
    assert optimizers.step(rate) > 0


def snapshot(policy: Policy, world: World, **changes: Any) -> WeightSnapshot:
    """Version 1.1 as engines get it."""
    given = {"dtype": "float32", "bucket_bytes": 1 << 14, **changes}
    made = take_snapshot(policy, world, run="r", version=Version(1, 1), **given)
    assert made is not None
    return made


def tensors_of(sent: WeightSnapshot) -> dict[str, torch.Tensor]:
    kinds = {spec.name: getattr(torch, spec.dtype) for spec in sent.manifest.tensors}
    return {
        spec.name: torch.from_numpy(
            sent.bucket(spec.bucket)[spec.offset : spec.offset + spec.nbytes].copy()
        ).view(kinds[spec.name]).view(spec.shape)
        for spec in sent.manifest.tensors
    }  # fmt: skip


def exact_logprobs(hf: Any, row: Int32, temperature: float = 1.0) -> torch.Tensor:
    """transformers' log-prob of each token but the first: [T - 1]."""
    ids = torch.from_numpy(row)[None].long()
    with torch.no_grad():
        logprobs = (hf(ids).logits[0, :-1].float() / temperature).log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0]


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
    """Rows with a teacher's random most likely tokens; the first place of a prompt has nothing before it."""
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
    good = checkpoint.newest(target / "checkpoints")
    reached = state(0, world_size=world.size)
    if good:
        reached = checkpoint.load(good[0], learner.policy, learner.optimizers)
    for step in range(reached.step, steps):
        metrics = learn(learner, rows, step)
        saved = dataclasses.replace(reached, step=step + 1)
        checkpoint.save(
            target / "checkpoints", learner.policy, learner.optimizers, saved, world, keep=9
        )
    export_policy(learner.policy, world, target / "export", tokenizer=model)
    names = ("actor/loss", "actor/grad_norm", "actor/entropy")
    return [cast(float, metrics[name]) for name in names]
