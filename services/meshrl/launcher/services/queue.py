"""Declares the queue service, which keeps the rows of all runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshrl.config.recipe import Recipe
from meshrl.config.stages import ServiceKind

if TYPE_CHECKING:
    from meshrl.rpc.runtime import ServiceContext


def _rows_are_lost(recipe: Recipe) -> str:
    if recipe.queue.store != "memory":
        return ""
    return "queue.store is memory, so its rows went with it; queue.store=disk survives"


def _file_is_damaged(recipe: Recipe) -> str:
    """LMDB ends the process on some damaged pages."""
    if recipe.queue.store != "disk":
        return ""
    return f"{recipe.queue_path / 'data.mdb'} is damaged: restore a backup (meshrl queue restore)"


SERVICE = ServiceKind(
    sections=("queue",),
    start_order=0,
    drain_order=2,
    cannot_restart=_rows_are_lost,
    crash_at_start=_file_is_damaged,
)


async def run(recipe: Recipe, context: ServiceContext) -> None:
    """Serve until stopped."""
    from meshrl.launcher.running import queue

    await queue.run(recipe, context)
