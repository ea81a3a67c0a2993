"""A named algorithm over the tiny model, and a batch for it with rows that deserve to become likelier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshrl.config.loading import load_recipe
from meshrl.config.recipe import Recipe, algorithm_needs
from meshrl.contract.types import Batch, Trajectory, Uid, Version, VersionSpan
from meshrl.launcher.learner import build_learner
from meshrl.trainer.algorithms.advantages.prime import Options as PrimeOptions
from meshrl.trainer.algorithms.options import options
from meshrl.trainer.learner.learner import Learned, Learner
from meshrl.trainer.learner.micro_batcher import MicroBatcher
from meshrl.trainer.ranks.world import World
from meshrl.trainer.reference.model import ReferenceModel
from tests.unit.trainer import rank_work

RECIPES = Path(__file__).parents[3] / "recipes" / "algorithms"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
PROMPT, VOCABULARY, ROWS = 3, 37, 16
EPS = 1000.0
PLAIN = "lr: 1000.0, weight_decay: 0.0, clip_grad: 1.0e+9"
"""AdamW's first update with this eps is lr · g: weights show the gradient itself."""
GRADIENTS = (
    *(f"{at}={{eps: {EPS}, {PLAIN}}}" for at in ("actor.optim", "critic.optim")),
    f"algorithm.prime.optim={{{PLAIN}}}",  # `recipe_of` sets its eps, which no recipe can
    "critic.pretrain_steps=0",
    "critic.warmup_steps=0",
    "actor.ppo_mini_batch_size=null",
)
"""One update that every model takes part in, and that shows its gradient."""


def recipe_of(name: str, model: Path, *overrides: str) -> Recipe:
    recipe = load_recipe(
        RECIPES / f"{name}.yaml",
        [f"model.path={model}", "data.max_response_length=40", *overrides],
        check=False,
    )
    if not set(GRADIENTS) <= set(overrides):
        return recipe
    prime = options(recipe.algorithm, PrimeOptions).prime
    optim = prime.optim.model_copy(update={"eps": EPS})
    algorithm = recipe.algorithm.model_copy(
        update={"prime": prime.model_copy(update={"optim": optim})}
    )
    return recipe.model_copy(update={"algorithm": algorithm})


def learner_of(recipe: Recipe, world: World) -> Learner:
    return build_learner(recipe, None, world)


def trajectories(recipe: Recipe, model: Path) -> list[Trajectory]:
    """Groups in which some rows are right and some wrong, log-probs as the model gives them, tool tokens in some."""
    size = recipe.rollout.n
    draw = np.random.default_rng(7)
    tokens = [
        draw.integers(0, VOCABULARY, PROMPT + int(draw.integers(2, 30))).astype(np.int32)
        for _ in range(ROWS // size * size)
    ]
    for index, row in enumerate(tokens):  # the rows of a group answer one prompt
        row[:PROMPT] = tokens[index // size * size][:PROMPT]
    reference = ReferenceModel(model, device="cpu", deterministic=True)
    logprobs = [row["ref_logprobs"] for row in asyncio.run(reference.judged(tokens))]
    reference.close()
    rows = []
    for index, (row, known) in enumerate(zip(tokens, logprobs, strict=True)):
        mask = np.ones(len(row), dtype=np.uint8)
        mask[:PROMPT] = 0
        if index % 3 == 0 and len(row) > PROMPT + 6:
            mask[PROMPT + 2 : PROMPT + 4] = 0
        rows.append(
            Trajectory(
                uid=Uid("r", f"t{index // size:02d}", index % size),
                tokens=row,
                loss_mask=mask,
                rollout_logprobs=np.where(mask, known, 0).astype(np.float32),
                spans=(VersionSpan(version=Version(1, 0), start=PROMPT, end=len(row)),),
                reward=float((index % size + index // size) % 2),
                ref_logprobs=known,
            )
        )
    return rows


def trajectory_of(task: str, prompt: Sequence[int], answer: Sequence[int]) -> Trajectory:
    """One sampled answer, with a reward of 0."""
    tokens = np.array([*prompt, *answer], dtype=np.int32)
    mask = np.array([0] * len(prompt) + [1] * len(answer), dtype=np.uint8)
    return Trajectory(
        uid=Uid("r", task, 0),
        tokens=tokens,
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -3.5, 0).astype(np.float32),
        spans=(VersionSpan(version=Version(1, 0), start=len(prompt), end=len(tokens)),),
        reward=0.0,
    )


def batch_of(recipe: Recipe, rows: list[Trajectory]) -> tuple[Batch, dict[str, float] | None]:
    """The manifest, and the greedy rewards where the algorithm wants them."""
    extra = algorithm_needs(recipe).extra_rows
    size = recipe.rollout.n + extra
    manifest = [rank_work.manifest_row(row.uid, size, len(row.tokens)) for row in rows]
    greedy = [
        replace(row, uid=Uid("r", row.group, recipe.rollout.n))
        for row in manifest
        if extra and row.uid.index == 0
    ]
    baselines = {row.group: 0.5 for row in greedy} if extra else None
    together = sorted([*manifest, *greedy], key=lambda row: (row.group, row.uid.index))
    return rank_work.batch_of(together), baselines


def learn(
    learner: Learner,
    recipe: Recipe,
    rows: list[Trajectory],
    step: int = 0,
    observe: Callable[[Learned], None] | None = None,
) -> dict[str, Any]:
    """One step."""
    batch, baselines = batch_of(recipe, rows)
    return rank_work.learn(learner, rows, step, of=batch, baselines=baselines, observe=observe)


def row_logprobs(learner: Learner, recipe: Recipe, rows: list[Trajectory]) -> torch.Tensor:
    """Mean log-prob of the sampled tokens of each row."""
    made = learner.schedule(batch_of(recipe, rows)[0])
    by_uid = {row.uid: row for row in rows}
    own = MicroBatcher.of(made, rank_work.own_rows(made, rows), learner.world)
    flat = own.forward(learner.policy, lambda pack: learner.policy(pack, 1.0)[0])
    in_order = [by_uid[row.uid] for row in made.rows]
    parts = torch.split(flat, [len(row.tokens) - row.prompt_length for row in in_order])
    masks = [torch.from_numpy(row.loss_mask[row.prompt_length :]).bool() for row in in_order]
    found = {
        row.uid: part[mask].mean() for row, part, mask in zip(made.rows, parts, masks, strict=True)
    }
    return torch.stack([found[row.uid] for row in rows])


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    """Weights of every model that learns, by name."""
    models = {"policy": learner.policy, **{n: t.model for n, t in learner.beside.items()}}
    return {
        f"{name}.{key}": p.full_tensor().detach().clone()  # type: ignore[attr-defined]
        for name, model in models.items()
        for key, p in model.named_parameters()
    }
