"""The queue service: a store, the transfer queue on it, its door."""

from __future__ import annotations

from meshrl.contract.errors import UserError
from meshrl.services.config.recipe import Recipe
from meshrl.services.doors.queue import QueueDoor
from meshrl.services.runtime import Server
from meshrl.services.site import Site
from meshrl.transferqueue import stores
from meshrl.transferqueue.queue import TransferQueue


async def run(recipe: Recipe, site: Site) -> None:
    """Serve until stopped. The store is closed last, when no call can write to it any more.

    Raises:
        UserError: the store's directory cannot be made.
    """
    try:
        recipe.queue_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"queue.path: {recipe.queue_path}: {error.strerror}") from error
    queue = await TransferQueue.open(stores.build(recipe.queue, recipe.queue_path))
    try:
        async with Server(site.settings, [QueueDoor(queue)]) as server:
            await server.ready()
            await server.until_stopped()
    finally:
        await queue.close()
