"""Settings of a campaign: the paths of its files, the shape of its run, the number of its faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from meshrl.contract.types import REFERENCE_STAGE, REWARD_STAGE, ROLLOUT_STAGE, RunSpec

RUN: Final = "run"
GROUP: Final = 3
BATCH: Final = 2
MAX_STALENESS: Final = 2
STAGES: Final = (ROLLOUT_STAGE, REWARD_STAGE, REFERENCE_STAGE)
CHECKPOINT_EVERY: Final = 3
PROXY: Final = "proxy"
QUEUE: Final = "queue"
ACTORS: Final = ("feeder", "producer-0", "producer-1", "annotator", "consumer")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One campaign. Everything in it that is random follows from `seed`, except what the machine's load decides."""

    folder: Path
    seed: int = 0
    kills: int = 0
    pauses: int = 0
    """SIGSTOP for longer than a lease lasts, then SIGCONT."""
    cuts: int = 0
    """Cuts of the network between the queue and all others, which then live in network namespaces."""
    cut_s: float = 3.0
    fills: int = 0
    """Times that the queue's disk, a small file system of its own, is filled."""
    pace_s: float = 0.35
    """Between two strikes, on average."""
    lease_ttl_s: float = 1.0
    bug: str = ""
    """A queue that is wrong on purpose, from bugs.py."""
    queue: dict[str, Any] = field(default_factory=dict)
    """Keys of the recipe's `queue:` section: the store and its options."""
    lost_answers: float = 0.0
    """Share of the queue's answers that never arrive; clients then reach it through a proxy."""
    host: str = "127.0.0.1"
    proxy_port: int = 0
    port: int = 0
    """The queue's port."""

    @property
    def spec(self) -> RunSpec:
        return RunSpec(
            run=RUN,
            group_size=GROUP,
            batch_groups=BATCH,
            max_staleness=float(MAX_STALENESS),
            stages=STAGES,
            lease_ttl_s=self.lease_ttl_s,
            max_attempts=1_000_000,
        )

    @property
    def address(self) -> str:
        """The address of the queue, or of the proxy before it."""
        return f"{self.host}:{self.proxy_port or self.port}"

    @property
    def store(self) -> Path:
        return self.folder / "queue"

    @property
    def events(self) -> Path:
        return self.folder / "events"

    @property
    def lineage(self) -> Path:
        """A line for each step of the model: the "weights" that the consumer learns."""
        return self.folder / "lineage.jsonl"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.json"

    @property
    def final(self) -> Path:
        """The report of a queue opened on the store after the end."""
        return self.folder / "final.json"

    @property
    def lost(self) -> Path:
        """A byte for each answer that was lost."""
        return self.folder / "lost-answers"

    @property
    def enough(self) -> Path:
        """When this file is there, the feeder closes the feed."""
        return self.folder / "enough"
