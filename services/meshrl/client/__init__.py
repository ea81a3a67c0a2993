"""The client of the transfer queue, for your own programs. It needs neither the rest of the mesh nor torch.

    async with Queue.connect("127.0.0.1:7001") as queue:
        run = await queue.open_run(RunSpec(run="mine", group_size=8, batch_groups=4, max_staleness=1))

    feeder     await run.put(tasks)
    worker     async with run.lease("rollout", limit=8) as lease: await lease.write(rows)
    trainer    async for batch in run.batches(groups=4): ...

`TrainingClient` trains models on a server by requests of your own. `meshrl.client.sync` has the same classes without
`await`; `meshrl.client.dataset` has an IterableDataset for PyTorch.
`Queue.port` is the full port (`meshrl.contract.ports.Queue`) with every operation.
"""

from meshrl.client.batches import (
    Batches as Batches,
    Checkpoint as Checkpoint,
    TrainBatch as TrainBatch,
)
from meshrl.client.leases import HeldLease as HeldLease, LeaseLostError as LeaseLostError
from meshrl.client.queue import Queue as Queue, Run as Run
from meshrl.client.training import (
    TrainedModel as TrainedModel,
    TrainingClient as TrainingClient,
)
from meshrl.contract.errors import (
    CapacityError as CapacityError,
    ConflictError as ConflictError,
    EndOfDataError as EndOfDataError,
    FencedError as FencedError,
    MeshError as MeshError,
    NotFoundError as NotFoundError,
    UnavailableError as UnavailableError,
    UserError as UserError,
    WaitTimeoutError as WaitTimeoutError,
)
from meshrl.contract.rows import reward_write as reward_write, rollout_write as rollout_write
from meshrl.contract.types import (
    REFERENCE_STAGE as REFERENCE_STAGE,
    REWARD_STAGE as REWARD_STAGE,
    ROLLOUT_STAGE as ROLLOUT_STAGE,
    AdamStep as AdamStep,
    CreateModel as CreateModel,
    LeasedRow as LeasedRow,
    Ledger as Ledger,
    LoadWeights as LoadWeights,
    Media as Media,
    Outcome as Outcome,
    Pass as Pass,
    RowFacts as RowFacts,
    RowWrite as RowWrite,
    RunSpec as RunSpec,
    RunState as RunState,
    SamplingParams as SamplingParams,
    SaveWeights as SaveWeights,
    Score as Score,
    StageSpec as StageSpec,
    Task as Task,
    TrainingExample as TrainingExample,
    TrainingResult as TrainingResult,
    Trajectory as Trajectory,
    Uid as Uid,
    UnloadModel as UnloadModel,
    Version as Version,
    VersionSpan as VersionSpan,
    Waiting as Waiting,
)
