"""The built-in kinds of service, as every process must know them before one runs: light, without gRPC and torch.

`services/<kind>.py` builds and runs one. A stage of your own has both in one module: `SERVICE` and `run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from meshrl.config.recipe import (
    Recipe,
    algorithm_needs,
    needs_reference,
    posts_rewards,
    trains_each_branch,
)
from meshrl.config.stages import LONGEST_LOAD_S, Columns, ServiceKind, always, loads_a_model
from meshrl.contract.types import PARTS, REFERENCE_STAGE, reward_stage, rollout_stage


def _rows_are_lost(recipe: Recipe) -> str:
    if recipe.queue.store != "memory":
        return ""
    return "queue.store is memory, so its rows went with it; queue.store=disk survives"


def _file_is_damaged(recipe: Recipe) -> str:
    """LMDB ends the process on some damaged pages."""
    if recipe.queue.store != "disk":
        return ""
    return f"{recipe.queue_path / 'data.mdb'} is damaged: restore a backup (meshrl queue restore)"


_QUEUE = ServiceKind(
    sections=("queue",),
    start_order=0,
    drain_order=2,
    cannot_restart=_rows_are_lost,
    crash_at_start=_file_is_damaged,
)


def _rollout_columns(recipe: Recipe, evaluation: bool) -> Columns:
    stage = rollout_stage(
        posted=posts_rewards(recipe),
        parts=trains_each_branch(recipe),
        routed_experts=recipe.rollout.routing_replay and not evaluation,
    )
    return Columns(reads=stage.reads, writes=stage.writes)


def _rollout_needs_torch(recipe: Recipe) -> bool:
    """The embedded engine does, and beside any engine the receiving end of `gloo`."""
    return recipe.rollout.name == "torch" or "gloo" in recipe.weights.offered


def _rollout_ready_s(recipe: Recipe) -> float:
    """Longer than the engine gives its server, so that the engine is the one to say what is wrong."""
    asked = recipe.rollout.engine.get("start_s")
    return 60.0 + (float(asked) if isinstance(asked, int | float) else LONGEST_LOAD_S)


_ROLLOUT = ServiceKind(
    sections=("model", "rollout", "weights"),
    columns=_rollout_columns,
    count=lambda recipe: recipe.rollout.workers,
    needs_torch=_rollout_needs_torch,
    ready_s=_rollout_ready_s,
    start_order=2,
    removable=True,
)


def _reward_columns(recipe: Recipe, evaluation: bool) -> Columns:
    stage = reward_stage(
        keep_inputs=recipe.reward.mixed_versions == "rescore" and not evaluation,
        token_rewards=recipe.reward.token_rewards and not evaluation,
        posted=posts_rewards(recipe),
    )
    return Columns(reads=stage.reads, writes=stage.writes)


_REWARD = ServiceKind(sections=("reward",), columns=_reward_columns)


def _reference_columns(recipe: Recipe, evaluation: bool) -> Columns | None:
    # Evaluation has no KL term.
    if evaluation or not needs_reference(recipe):
        return None
    parts = (PARTS,) if trains_each_branch(recipe) else ()
    return Columns(
        reads=(*REFERENCE_STAGE.reads, *parts),
        writes=algorithm_needs(recipe).columns,
    )


_REFERENCE = ServiceKind(
    sections=("model", "reference"),
    columns=_reference_columns,
    needs_torch=always,
    ready_s=loads_a_model,
    ranks=lambda recipe: recipe.reference.nproc,
)


_TRAINER = ServiceKind(
    sections=("model", "algorithm", "actor", "trainer", "weights"),
    machines=lambda recipe: recipe.trainer.nnodes,
    needs_torch=always,
    ready_s=loads_a_model,
    drain_order=0,
    drain_s=300,
    finite=True,
    leads=True,
    ranks=lambda recipe: recipe.trainer.ranks,
)


_TINKER = ServiceKind(
    sections=("model", "rollout", "tinker"),
    needs_torch=always,
    ready_s=loads_a_model,
)


_FEEDER = ServiceKind(sections=("model", "data"), start_order=2, finite=True)

KINDS: Final[Mapping[str, ServiceKind]] = {
    "queue": _QUEUE,
    "rollout": _ROLLOUT,
    "reward": _REWARD,
    "reference": _REFERENCE,
    "trainer": _TRAINER,
    "feeder": _FEEDER,
    "tinker": _TINKER,
}
