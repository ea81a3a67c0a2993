"""`data.reasoning_gym` of a recipe: which tasks are asked, and at which levels."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from meshrl.common.config import Config


class ReasoningGymTaskConfig(Config):
    """One task of reasoning-gym."""

    weight: PositiveFloat = 1.0
    """Its share of the rows, beside the other tasks' weights."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Options of the task, as reasoning-gym names them."""


UNSCORABLE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks of reasoning-gym 0.1.25 whose rows have no answer."""


def _scorable(
    tasks: dict[str, ReasoningGymTaskConfig],
) -> dict[str, ReasoningGymTaskConfig]:
    if unscorable := sorted(tasks.keys() & UNSCORABLE):
        raise ValueError(f"rows of {', '.join(unscorable)} have no answer to score: leave it out")
    return tasks


class ReasoningGymCurriculumConfig(Config):
    """When a task of reasoning-gym goes on to its next level: by its held-out score at the level that it has."""

    raise_at: float = Field(default=0.8, gt=0.0, le=1.0)
    """The score from which on the next level is asked."""


class ReasoningGymConfig(Config):
    """Prompts that reasoning-gym makes; the reward `reasoning_gym` scores the answers."""

    tasks: Annotated[dict[str, ReasoningGymTaskConfig], AfterValidator(_scorable)] = Field(
        min_length=1
    )
    """By the names of reasoning-gym: `chain_sum: {}`."""
    size: PositiveInt = 1000
    """Training prompts of all tasks together."""
    val_size: NonNegativeInt = 100
    """Held-out prompts of all tasks together; their questions are not asked in training."""
    seed: int = 0
    """Of the tasks and of their order."""
    levels: PositiveInt = 1
    """More than one: that many levels of each task's curriculum, in equal parts; a row's level is
    `extra_info.difficulty`, which `data.curriculum: difficulty` sorts by. Options of a task outrank its level's."""
    curriculum: ReasoningGymCurriculumConfig | None = None
    """Each task is asked at one level, which follows its held-out score; `{}` has the defaults. None: rows of all
    levels."""
    system_prompt: str = "Give your final answer between <answer> and </answer>."
    """Goes before each question; the reward looks for those marks. Empty: nothing."""
    chat: bool = True
    """Prompts are chats, for a tokenizer with a chat template; False: plain text."""

    @model_validator(mode="after")
    def _has_levels(self) -> Self:
        if self.curriculum and self.levels < 2:
            raise ValueError("curriculum needs levels: 2 or more")
        if self.curriculum and not self.val_size:
            raise ValueError("curriculum follows held-out scores: want val_size above 0")
        return self
