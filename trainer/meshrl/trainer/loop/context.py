"""The settings of one run's trainer, and the parts that its loop, its checkpoints and its resumption share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from meshrl.contract.ports import Queue, WeightSource
from meshrl.trainer.checkpoint import checkpoint
from meshrl.trainer.checkpoint.checkpoint import Checkpoints
from meshrl.trainer.checkpoint.export import export_policy
from meshrl.trainer.config import FilterGroupsConfig, TrainerConfig
from meshrl.trainer.learner.learner import Learner
from meshrl.trainer.model.snapshot import take_snapshot
from meshrl.trainer.ranks.world import Compute


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """Made by the entry point from the recipe."""

    run: str
    directory: Path
    """The run's directory: metrics, checkpoints, export."""
    owner: str
    """Name of this trainer in the queue; a trainer that it fences sees it."""
    seed: int
    trainer: TrainerConfig
    tokenizer: Path
    """Directory of the tokenizer that is exported."""
    batch_groups: int
    """Prompts of one training step."""
    group_size: int
    """Rows of one prompt, greedy baselines included."""
    extra_rows: int = 0
    """Greedy baselines among them."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """Dynamic sampling: which groups are left out of a step."""
    total_steps: int | None
    """None: until the data end."""
    weight_dtype: str = "float32"
    """dtype of the weights sent to the engines."""
    bucket_bytes: int = 256 << 20
    adapters_only: bool = False
    """Send the engines LoRA's adapters instead of merged weights."""
    blocking_evaluation: bool = False
    """True: training waits for each evaluation (on-policy runs); False: it runs beside it."""

    @property
    def batch_rows(self) -> int:
        """Rows of one training step."""
        return self.batch_groups * self.group_size

    @property
    def checkpoints(self) -> Path:
        """Directory of the run's checkpoints."""
        return self.trainer.default_local_dir or self.directory / "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunContext:
    """One rank's share of a run: its settings, its queue, and how it computes and keeps weights."""

    settings: TrainerSettings
    queue: Queue
    """Source of batches."""
    learner: Learner
    """Policy, optimizer and algorithm."""
    compute: Compute
    """The thread that computes; its owner closes it."""
    checkpoints: Checkpoints = checkpoint
    """Makes, writes and reads checkpoints."""
    snapshot: Callable[..., WeightSource | None] = take_snapshot
    """Freezes a version."""
    export: Callable[..., object] = export_policy
    """Writes the last version as a Hugging Face checkpoint."""
