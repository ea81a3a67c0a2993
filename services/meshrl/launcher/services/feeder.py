"""The feeder service: prompts from files, admitted as fast as the queue has room. It ends when all are in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshrl.config.recipe import Recipe
from meshrl.config.stages import ServiceKind

if TYPE_CHECKING:
    from meshrl.rpc.service_context import ServiceContext


SERVICE = ServiceKind(sections=("model", "data"), start_order=2, finite=True)


async def run(recipe: Recipe, context: ServiceContext) -> None:
    """Feed until stopped or done."""
    from meshrl.launcher.services import _feeder

    await _feeder.run(recipe, context)
