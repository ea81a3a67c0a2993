"""How large a simulated mesh is and how long its parts take, as a seed draws it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import Final

from meshrl.contract.types import (
    REFERENCE_STAGE,
    GroupPolicy,
    OnUpdate,
    RunSpec,
    StalePolicy,
    reward_stage,
    rollout_stage,
)
from tests.simulation.conversations import Program
from tests.simulation.faults import LATE_CHECKPOINT, TAKEOVER, scene_of
from tests.simulation.network import Delays

RUN: Final = "run"
CONVERSATION_TOKENS: Final = 256
"""The most of a row of several turns, with what is observed."""
FAST: Final = 0.2
"""Share of seeds with many short steps: versions follow each other faster than a slow replica receives them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a mesh, and how long its parts take."""

    workers: int = 2
    slots: int = 2
    rewards: int = 1
    references: int = 0
    """Reference stages; 0: the run has no KL term."""
    ranks: int = 1
    prompts: int = 8
    epochs: int = 1
    group: int = 2
    batch: int = 2
    max_staleness: float = 1
    stale_policy: StalePolicy = StalePolicy.REISSUE
    group_policy: GroupPolicy = GroupPolicy.ALL
    max_attempts: int = 12
    lease_ttl_s: float = 5.0
    save_freq: int = 2
    filter_groups: bool = False
    program: Program = Program.SINGLE_TURN
    agents: int = 0
    """External agents, which claim sessions of the program `openai`."""
    boxes: int = 0
    """Containers of each rollout worker, one for a row; 0: rows have none."""
    tokens: int = 32
    deltas: int = 4
    deadline_s: float = 600.0
    """Deadline of a row; an agent that dies leaves its session until then."""
    response_s: float = 2.0
    """Mean of a response; the tail is long."""
    slow_prompt_s: float = 0.0
    """Responses to one prompt take so long; 0: none is like this."""
    train_s: float = 1.0
    checkpoint_s: float = 1.0
    transfer_s: float = 0.3
    """Writing or reading a version; half of it: taking it into an engine."""
    carrier: str = "shm"
    anchor_every: int = 1
    late_quorum: float = 1.0
    on_update: OnUpdate = OnUpdate.IN_FLIGHT
    reward_s: float = 0.2
    saves_progress: bool = True
    chunk: int = 4
    """Tasks in one call of the feeder: its position moves once they are all in."""
    faults_until_s: float = 60.0
    most_faults: int = 12
    delays: Delays = field(default_factory=Delays)

    @property
    def services(self) -> tuple[str, ...]:
        """The names of everything that can fail."""
        return (
            "queue",
            "feeder",
            "trainer",
            *(f"trainer-{rank}" for rank in range(1, self.ranks)),
            *(f"rollout-{number}" for number in range(self.workers)),
            *(f"reward-{number}" for number in range(self.rewards)),
            *(f"reference-{number}" for number in range(self.references)),
            *(f"agent-{number}" for number in range(self.agents)),
        )

    @property
    def spec(self) -> RunSpec:
        """The run's spec for the queue."""
        posted = self.program is Program.OPENAI
        return RunSpec(
            run=RUN,
            stages=(
                rollout_stage(posted=posted),
                *(REFERENCE_STAGE,) * bool(self.references),
                reward_stage(posted=posted),
            ),
            group_size=self.group,
            batch_groups=self.batch,
            max_staleness=self.max_staleness,
            max_attempts=self.max_attempts,
            lease_ttl_s=self.lease_ttl_s,
            stale_policy=self.stale_policy,
            group_policy=self.group_policy,
            group_k=max(1, self.group - 1) if self.group_policy is GroupPolicy.K_OF_N else 0,
        )


def draw_shape(seed: int) -> Shape:
    """The mesh of a seed."""
    draw = random.Random(f"shape {seed}")
    group = draw.randint(1, 4)
    policies = list(GroupPolicy) if group > 1 else [GroupPolicy.ALL]
    plane = random.Random(f"weights {seed}")
    pace = random.Random(f"pace {seed}")
    talk = random.Random(f"programs {seed}")
    program = talk.choice((*(Program.SINGLE_TURN,) * 5, Program.TOOLS, Program.OPENAI))
    shape = Shape(
        workers=draw.randint(1, 4),
        slots=draw.randint(1, 4),
        rewards=draw.randint(1, 2),
        ranks=draw.choice((1, 1, 2, 3)),
        prompts=draw.randint(4, 14),
        epochs=draw.choice((1, 1, 2)),
        group=group,
        batch=draw.randint(1, 3),
        max_staleness=draw.choice((0, 1, 1, 2, math.inf)),
        stale_policy=draw.choice((StalePolicy.REISSUE, StalePolicy.REISSUE, StalePolicy.DROP)),
        group_policy=draw.choice(policies),
        lease_ttl_s=draw.choice((3.0, 5.0, 10.0)),
        save_freq=draw.choice((1, 2, 3)),
        filter_groups=group > 1 and draw.random() < 0.2,
        response_s=draw.choice((0.5, 2.0, 6.0)),
        slow_prompt_s=draw.choice((0.0, 0.0, 0.0, 30.0)),
        train_s=draw.choice((0.2, 1.0, 3.0)),
        checkpoint_s=draw.choice((0.2, 1.0, 4.0)),
        transfer_s=draw.choice((0.1, 0.5, 2.0)),
        saves_progress=draw.random() < 0.6,
        chunk=random.Random(f"feeder {seed}").choice((2, 5, 64)),
        carrier=plane.choice(("shm", "shm", "disk", "auto")),
        anchor_every=plane.randint(1, 3),
        late_quorum=plane.choice((1.0, 1.0, 0.5)),
        on_update=plane.choice((OnUpdate.IN_FLIGHT, OnUpdate.IN_FLIGHT, OnUpdate.DRAIN)),
        faults_until_s=pace.choice((20.0, 60.0)),
        references=random.Random(f"references {seed}").choice((0, 0, 0, 1, 2)),
        program=program,
        agents=talk.randint(1, 6) if program is Program.OPENAI else 0,
        deadline_s=150.0 if program is Program.OPENAI else 600.0,
        tokens=32 if program is Program.SINGLE_TURN else CONVERSATION_TOKENS,
    )
    if shape.ranks == 3 and random.Random(f"ranks {seed}").random() < 0.5:
        shape = replace(shape, ranks=4)
    scene = scene_of(seed)
    if takeovers := scene in (TAKEOVER, LATE_CHECKPOINT):
        shape = replace(
            shape,
            workers=max(2, shape.workers),
            max_staleness=pace.choice((2, 8, math.inf)),
            faults_until_s=20.0,
        )
    if scene is LATE_CHECKPOINT:
        shape = replace(shape, checkpoint_s=4.0, save_freq=3)
    if pace.random() >= FAST and not takeovers:
        return shape
    return replace(
        shape,
        prompts=pace.randint(16, 32),
        epochs=1,
        group=1,
        batch=1,
        group_policy=GroupPolicy.ALL,
        filter_groups=False,
        response_s=0.5,
        train_s=0.2,
        transfer_s=shape.transfer_s if takeovers else 0.1,
    )
