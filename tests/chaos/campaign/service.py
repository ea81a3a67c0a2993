"""The queue of a campaign: a store, the transfer queue on it, its servicers; and a last check of the store."""

from __future__ import annotations

import json

from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue

from .bugs import planted
from .plan import RUN, Plan
from .recorded import ledger_facts


async def opened(plan: Plan) -> TransferQueue:
    """The queue on its store."""
    config = QueueConfig.model_validate(plan.queue)
    return await TransferQueue.open(stores.build(config, plan.store))


async def serve(plan: Plan) -> None:
    """Serve it until stopped."""
    queue = await opened(plan)
    settings = ServerSettings(
        host=plan.host,
        port=plan.port,
        metrics_port=None,
        drain_grace_s=1.0,
        allow_insecure_bind=True,
    )
    try:
        async with GrpcServer(settings, [QueueServicer(planted(plan.bug, queue))]) as server:
            await server.ready()
            await server.until_stopped()
    finally:
        await queue.close()


async def look(plan: Plan) -> None:
    """Open the store once more and write down what the queue says."""
    queue = await opened(plan)
    ledger, state = await queue.ledger(RUN), await queue.run_state(RUN)
    assert ledger.balanced
    await queue.close()
    report = {"ledger": ledger_facts(ledger), "cursor": state.cursor}
    plan.final.write_text(json.dumps(report))
