"""Declares the reward service, which scores answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshrl.config.recipe import Recipe, posts_rewards
from meshrl.config.stages import Columns, ServiceKind
from meshrl.contract.types import reward_stage

if TYPE_CHECKING:
    from meshrl.rpc.runtime import ServiceContext


def _columns(recipe: Recipe, evaluation: bool) -> Columns:
    stage = reward_stage(
        keep_inputs=recipe.reward.mixed_versions == "rescore" and not evaluation,
        token_rewards=recipe.reward.token_rewards and not evaluation,
        posted=posts_rewards(recipe),
    )
    return Columns(reads=stage.reads, writes=stage.writes)


SERVICE = ServiceKind(sections=("reward",), columns=_columns)


async def run(recipe: Recipe, context: ServiceContext) -> None:
    """Score rows until stopped."""
    from meshrl.launcher.running import reward

    await reward.run(recipe, context)
