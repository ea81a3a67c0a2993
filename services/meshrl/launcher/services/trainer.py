"""Declares the trainer service: takes batches, learns, publishes weights. When it is done, the run is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshrl.config.recipe import Recipe
from meshrl.config.stages import ServiceKind, always, loads_a_model

if TYPE_CHECKING:
    from meshrl.rpc.runtime import ServiceContext


SERVICE = ServiceKind(
    sections=("model", "algorithm", "actor", "trainer", "weights"),
    machines=lambda recipe: recipe.trainer.nnodes,
    needs_torch=always,
    ready_s=loads_a_model,
    drain_order=0,
    drain_s=300,
    finite=True,
    leads=True,
)


async def run(recipe: Recipe, context: ServiceContext) -> None:
    """Train until the end of the run, or until stopped; then save.

    Raises:
        UserError: weights or gradients would be open to others, and nobody has permitted that.
    """
    from meshrl.launcher.running import ranks

    ranks.refuse_open_weights(recipe.weights, context.settings)
    ranks.refuse_open_ranks(recipe, context.settings)
    if recipe.trainer.ranks > 1 and not ranks.is_rank():
        await ranks.run(recipe, context)
        return
    from meshrl.launcher.running import trainer

    await trainer.run(recipe, context)
