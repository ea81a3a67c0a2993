"""What everything is called and typed by: versions, uids, outcomes, array types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Json: TypeAlias = Any
"""A value that `json.dumps` takes: the one `Any` of the contract."""
Int32: TypeAlias = npt.NDArray[np.int32]
Uint8: TypeAlias = npt.NDArray[np.uint8]
Float32: TypeAlias = npt.NDArray[np.float32]
Columns: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""Column name to array: the payload of one row, as the queue stores it."""


class Version(NamedTuple):
    """The version of a policy: `epoch` rises when a trainer takes the run over, `step` with each update.

    Ordered; never goes back, because a trainer that resumes from an older step has a higher epoch.
    """

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read `"epoch.step"`; raises ValueError on anything else."""
        epoch, _, step = text.partition(".")
        return cls(int(epoch), int(step))


@dataclass(frozen=True, slots=True, order=True)
class Uid:
    """Names one row for ever: the `attempt`-th try at sample `index` of a task.

    A redelivery after a fault keeps the uid (nothing was sampled that counts); a row that became too old and
    is sampled again gets the next attempt.
    """

    run: str
    task: str
    index: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.run}/{self.task}/{self.index}.{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> Uid:
        """Read `"run/task/index.attempt"`; raises ValueError on anything else."""
        head, _, tail = text.rpartition("/")
        run, _, task = head.partition("/")
        index, _, attempt = tail.partition(".")
        if not run or not task:
            raise ValueError(f"not a uid: {text!r} (want run/task/index.attempt)")
        return cls(run, task, int(index), int(attempt))


class Outcome(StrEnum):
    """How a rollout or a score ended. Only the first three may become training rows."""

    OK = "ok"
    TRUNCATED = "truncated"
    POLICY_FAULT = "policy_fault"
    INFRA_FAULT = "infra_fault"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"

    @property
    def trainable(self) -> bool:
        """True when the policy, not the infrastructure, is answerable for this outcome."""
        return self in (Outcome.OK, Outcome.TRUNCATED, Outcome.POLICY_FAULT)
