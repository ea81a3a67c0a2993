"""The nouns of the mesh: frozen values that travel between rooms.

Arrays are numpy, C-contiguous, little-endian. Shapes are written with T = tokens of one row (prompt and
response together), R = response tokens, G = rows of one group.
"""

from meshrl.contract.nouns.engine import (
    EngineStats,
    GenerateDelta,
    GenerateRequest,
    OnUpdate,
)
from meshrl.contract.nouns.groups import (
    Batch,
    BatchGroup,
    BatchRow,
    Lease,
    LeasedGroup,
    PackedGroup,
    Part,
    PayloadGroup,
    Siblings,
    gathered,
    packed_groups,
    siblings,
)
from meshrl.contract.nouns.judge import (
    Sample,
    Score,
)
from meshrl.contract.nouns.names import (
    Columns,
    Float32,
    Int32,
    Json,
    Outcome,
    Uid,
    Uint8,
    Version,
)
from meshrl.contract.nouns.rows import (
    LeasedRow,
    RowFacts,
    RowWrite,
    Trajectory,
    VersionSpan,
    oldest_version,
)
from meshrl.contract.nouns.runs import (
    REFERENCE_COLUMNS,
    REFERENCE_STAGE,
    RESCORABLE_REWARD_STAGE,
    REWARD_COLUMNS,
    REWARD_INPUTS,
    REWARD_STAGE,
    ROLLOUT_COLUMNS,
    ROLLOUT_STAGE,
    UNBOUNDED,
    DeadLetter,
    GroupPolicy,
    Ledger,
    RunSpec,
    RunState,
    StageSpec,
    StalePolicy,
    Waiting,
)
from meshrl.contract.nouns.tasks import (
    Message,
    SamplingParams,
    Task,
)
from meshrl.contract.nouns.trainer import (
    TrainerPhase,
    TrainerStatus,
)
from meshrl.contract.nouns.weights import (
    TensorSpec,
    WeightManifest,
)

__all__ = [
    "REFERENCE_COLUMNS",
    "REFERENCE_STAGE",
    "RESCORABLE_REWARD_STAGE",
    "REWARD_COLUMNS",
    "REWARD_INPUTS",
    "REWARD_STAGE",
    "ROLLOUT_COLUMNS",
    "ROLLOUT_STAGE",
    "UNBOUNDED",
    "Batch",
    "BatchGroup",
    "BatchRow",
    "Columns",
    "DeadLetter",
    "EngineStats",
    "Float32",
    "GenerateDelta",
    "GenerateRequest",
    "GroupPolicy",
    "Int32",
    "Json",
    "Lease",
    "LeasedGroup",
    "LeasedRow",
    "Ledger",
    "Message",
    "OnUpdate",
    "Outcome",
    "PackedGroup",
    "Part",
    "PayloadGroup",
    "RowFacts",
    "RowWrite",
    "RunSpec",
    "RunState",
    "Sample",
    "SamplingParams",
    "Score",
    "Siblings",
    "StageSpec",
    "StalePolicy",
    "Task",
    "TensorSpec",
    "TrainerPhase",
    "TrainerStatus",
    "Trajectory",
    "Uid",
    "Uint8",
    "Version",
    "VersionSpan",
    "Waiting",
    "WeightManifest",
    "gathered",
    "oldest_version",
    "packed_groups",
    "siblings",
]
