"""What a judge sees and says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshrl.contract.types.rows import Json, Message, Outcome, Uid


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a judge sees of a row."""

    uid: Uid
    data_source: str
    solution: str
    ground_truth: Json
    extra_info: Mapping[str, Json]
    messages: tuple[Message, ...] = ()
    """The prompt, for judges that read the conversation; empty where the caller has only tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostedReward:
    """What whoever made a row says it is worth; it stands in for the judge's score."""

    score: float
    components: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> Json:
        """For a column, and for a judge's `extra_info`."""
        return {"score": self.score, "components": dict(self.components)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a judge says of a sample. `score` counts only when `outcome.trainable`."""

    uid: Uid
    outcome: Outcome
    score: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    reward_hash: str = ""
    token_rewards: tuple[float, ...] | None = None
    """One per response token, in order, where the judge gives them: the reward then; `score` is what reports show."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """What the judge says in words, by name: kept with the row for people, and no metric."""
