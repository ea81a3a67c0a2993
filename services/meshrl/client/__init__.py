"""The client of the transfer queue, for your own programs. It needs neither the rest of the mesh nor torch.

    async with Queue.connect("127.0.0.1:7001") as queue:
        run = await queue.open_run(RunSpec(run="mine", group_size=8, batch_groups=4, max_staleness=1))

    feeder     await run.put(tasks)
    worker     async with run.lease("rollout", limit=8) as lease: await lease.write(rows)
    trainer    async for batch in run.batches(groups=4): ...

`meshrl.client.sync` has the same classes without `await`; `meshrl.client.dataset` has an IterableDataset for PyTorch.
`Queue.port` is the full port (`meshrl.contract.ports.Queue`) with every operation.
"""

from meshrl.client.batches import Batches, Checkpoint, TrainBatch
from meshrl.client.leases import HeldLease, LeaseLostError
from meshrl.client.queue import Queue, Run
from meshrl.contract.errors import (
    CapacityError,
    ConflictError,
    EndOfDataError,
    FencedError,
    MeshError,
    NotFoundError,
    UnavailableError,
    UserError,
    WaitTimeoutError,
)
from meshrl.contract.rows import reward_write, rollout_write
from meshrl.contract.types import (
    REFERENCE_STAGE,
    REWARD_STAGE,
    ROLLOUT_STAGE,
    LeasedRow,
    Ledger,
    Outcome,
    RowFacts,
    RowWrite,
    RunSpec,
    RunState,
    SamplingParams,
    Score,
    StageSpec,
    Task,
    Trajectory,
    Uid,
    Version,
    VersionSpan,
    Waiting,
)

__all__ = [
    "REFERENCE_STAGE",
    "REWARD_STAGE",
    "ROLLOUT_STAGE",
    "Batches",
    "CapacityError",
    "Checkpoint",
    "ConflictError",
    "EndOfDataError",
    "FencedError",
    "HeldLease",
    "LeaseLostError",
    "LeasedRow",
    "Ledger",
    "MeshError",
    "NotFoundError",
    "Outcome",
    "Queue",
    "RowFacts",
    "RowWrite",
    "Run",
    "RunSpec",
    "RunState",
    "SamplingParams",
    "Score",
    "StageSpec",
    "Task",
    "TrainBatch",
    "Trajectory",
    "Uid",
    "UnavailableError",
    "UserError",
    "Version",
    "VersionSpan",
    "WaitTimeoutError",
    "Waiting",
    "reward_write",
    "rollout_write",
]
