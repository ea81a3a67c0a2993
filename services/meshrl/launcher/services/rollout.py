"""Declares the rollout service: an engine that answers prompts, one process per replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshrl.config.recipe import Recipe, posts_rewards, trains_each_branch
from meshrl.config.stages import LONGEST_LOAD_S, Columns, ServiceKind
from meshrl.contract.types import rollout_stage

if TYPE_CHECKING:
    from meshrl.rpc.runtime import ServiceContext


def _columns(recipe: Recipe, evaluation: bool) -> Columns:
    stage = rollout_stage(
        posted=posts_rewards(recipe),
        parts=trains_each_branch(recipe),
        routed_experts=recipe.rollout.routing_replay and not evaluation,
    )
    return Columns(reads=stage.reads, writes=stage.writes)


def _needs_torch(recipe: Recipe) -> bool:
    """The embedded engine does, and beside any engine the receiving end of `gloo`."""
    return recipe.rollout.name == "torch" or "gloo" in recipe.weights.offered


def _ready_s(recipe: Recipe) -> float:
    """Longer than the engine gives its server, so that the engine is the one to say what is wrong."""
    asked = recipe.rollout.engine.get("start_s")
    return 60.0 + (float(asked) if isinstance(asked, int | float) else LONGEST_LOAD_S)


SERVICE = ServiceKind(
    sections=("model", "rollout", "weights"),
    columns=_columns,
    count=lambda recipe: recipe.rollout.workers,
    needs_torch=_needs_torch,
    ready_s=_ready_s,
    start_order=2,
    removable=True,
)


async def run(recipe: Recipe, context: ServiceContext) -> None:
    """Lease rows and answer their prompts until stopped."""
    from meshrl.launcher.running import rollout

    await rollout.run(recipe, context)
