"""The reward service: the judge, the stage that adds `reward` to rows, a door for who asks directly."""

from __future__ import annotations

from meshrl.rewardd.judge import build_judge
from meshrl.rewardd.stage import RewardStage
from meshrl.services.assembly._parts import STAGE_GRACE_S, open_runs, work_until_stopped
from meshrl.services.config.recipe import Recipe
from meshrl.services.doors.reward import RewardDoor
from meshrl.services.queues import connect_queue
from meshrl.services.runtime import Server
from meshrl.services.site import Site


async def run(recipe: Recipe, site: Site) -> None:
    """Serve until stopped."""
    address = site.peer("queue")
    judge = build_judge(recipe.reward)
    try:
        # A function that cannot be loaded ends the service here, before any row waits for it.
        await judge.start()
        async with (
            connect_queue(address) as queue,
            Server(site.settings, [RewardDoor(judge)]) as server,
        ):
            runs = await open_runs(queue, recipe)
            stage = RewardStage(
                queue,
                runs,
                judge,
                worker=site.name,
                limit=recipe.reward.slots,
                rows_per_call=recipe.reward.rows_per_call,
            )
            await server.ready()
            await work_until_stopped(server, stage.run(grace_s=STAGE_GRACE_S), stage.drain)
    finally:
        await judge.close()
