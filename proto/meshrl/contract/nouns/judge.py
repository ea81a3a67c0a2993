"""What a judge sees and says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshrl.contract.nouns.names import Json, Outcome, Uid


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a judge sees of a row."""

    uid: Uid
    data_source: str
    solution: str
    ground_truth: Json
    extra_info: Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a judge says of a sample. `score` counts only when `outcome.trainable`."""

    uid: Uid
    outcome: Outcome
    score: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    reward_hash: str = ""
