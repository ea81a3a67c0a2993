"""Settings of one run's trainer: the parts of a recipe that its loop reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from meshrl.trainer.config import FilterGroupsConfig, TrainerConfig


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
