"""The queue of a campaign: a store, the transfer queue on it, its servicers; and a last check of the store."""

from __future__ import annotations

import json

from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.rpc.servicers.shard import ShardServicer
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.sharding import ShardedQueue, ShardQueue, shard_list

from .bugs import planted
from .plan import RUN, Plan
from .recorded import ledger_facts


async def opened(plan: Plan, number: int) -> ShardQueue:
    """One shard, on its store."""
    config = QueueConfig.model_validate(plan.queue)
    return await ShardQueue.open(stores.build(config, plan.store_of(number)))


async def serve(plan: Plan, number: int) -> None:
    """Serve a shard until stopped."""
    queue = await opened(plan, number)
    settings = ServerSettings(
        host=plan.host,
        port=plan.ports[number],
        metrics_port=None,
        drain_grace_s=1.0,
        allow_insecure_bind=True,
    )
    try:
        servicers = [QueueServicer(planted(plan.bug, queue)), ShardServicer(queue)]
        async with GrpcServer(settings, servicers) as server:
            await server.ready()
            await server.until_stopped()
    finally:
        await queue.close()


async def look(plan: Plan) -> None:
    """Open the stores once more and write down what the queue says."""
    shards = [await opened(plan, number) for number in range(plan.all_shards)]
    if plan.grows:
        # In the order in which they were added, which is not that of their stores when two were at the same time.
        lines = [await shard_list.read(shard) for shard in shards]
        numbers = [line.number if line else -1 for line in lines]
        assert sorted(numbers) == list(range(plan.all_shards)), numbers
        shards = [shards[numbers.index(number)] for number in range(plan.all_shards)]
    queue = ShardedQueue(shards) if plan.all_shards > 1 else shards[0]
    ledger, state = await queue.ledger(RUN), await queue.run_state(RUN)
    parts = [await shard.ledger(RUN) for shard in shards]
    assert all(part.balanced for part in parts)
    if isinstance(queue, ShardedQueue):
        await queue.close()
    for shard in shards:
        await shard.close()
    report = {
        "ledger": ledger_facts(ledger),
        "cursor": state.cursor,
        "admitted": [part.admitted for part in parts],
    }
    plan.final.write_text(json.dumps(report))
