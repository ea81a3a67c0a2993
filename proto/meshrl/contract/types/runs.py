"""The declaration of a run, and the queue's reports about it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from meshrl.common.plain_text import counted
from meshrl.contract.types.rows import Outcome, Uid, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """A stage leases rows that have every column in `reads` and none in `writes`."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


ROLLOUT_COLUMNS = (
    "tokens",
    "loss_mask",
    "rollout_logprobs",
    "spans",
    "response_text",
    "replica",
)
REWARD_COLUMNS = ("reward", "reward_components", "reward_hash")
REWARD_INPUTS = "reward_inputs"
"""A judge's inputs beside the response, as JSON: with them a row can be scored again."""
TOKEN_REWARDS = "token_rewards"
"""float32[T]: what each token is rewarded with, where the run asks for that."""
POSTED_REWARD = "posted_reward"
"""uint8[n]: what the agent that made a row says it is worth, as JSON; empty for nothing. In runs of agents."""
PARTS = "parts"
"""uint8[n]: where the parts of a row begin and what their steps answer, as JSON; in runs that train each alone."""
ROUTED_EXPERTS = "routed_experts"
"""uint8[n]: the experts of each token (contract/routed_experts.py); in runs that replay them in the trainer."""
ROLLOUT_TIMES = "rollout_times"
"""float64[2]: when work on the row began and ended, in seconds since 1970 by the worker's clock."""
CONVERSATION = "conversation"
"""uint8[n]: the messages that follow the prompt, with tool calls, as JSON; of rows of several turns."""
REWARD_TIMES = "reward_times"
"""As `rollout_times`, of the score."""
DATA_SOURCE = "data_source"
"""uint8[n]: the `data_source` of the row's task, for metrics of each; of tasks that have one."""
MEDIA = "media"
"""uint8[n]: the pictures of a task, packed. No stage writes it: who asks for it finds it on the first row of each
group that is named, and on no row of a task without pictures."""
ROW_MEDIA = "row_media"
"""uint8[n]: the pictures of a row where they are not those of its task, packed in the order of their places: of rows
that an environment answered with pictures. Those of the task, and repeated ones, are named without their data."""
NOTES: Mapping[str, tuple[str, ...]] = {
    "rollout": (ROLLOUT_TIMES, CONVERSATION, ROW_MEDIA),
    "reward": (REWARD_TIMES, DATA_SOURCE),
}
"""Columns that a stage may write beside those of its spec, by stage. Nothing waits for them."""
REFERENCE_COLUMNS = ("ref_logprobs",)
REFERENCE_TOP = ("ref_top_ids", "ref_top_logprobs")
"""int32[T, k] and float32[T, k]: what a teacher thinks likeliest at each place, in runs that ask for it."""
ROLLOUT_STAGE = StageSpec(name="rollout", reads=(), writes=ROLLOUT_COLUMNS)
REWARD_STAGE = StageSpec(name="reward", reads=("response_text", "loss_mask"), writes=REWARD_COLUMNS)


def rollout_stage(
    *, posted: bool = False, parts: bool = False, routed_experts: bool = False
) -> StageSpec:
    """The rollout stage of a run.

    Args:
        posted: Its agents may say themselves what a row is worth.
        parts: A row has every branch of its conversation.
        routed_experts: A row has the experts of its tokens.
    """
    writes = list(ROLLOUT_COLUMNS)
    if posted:
        writes.append(POSTED_REWARD)
    if parts:
        writes.append(PARTS)
    if routed_experts:
        writes.append(ROUTED_EXPERTS)
    return StageSpec(name=ROLLOUT_STAGE.name, reads=(), writes=tuple(writes))


def reward_stage(
    *, keep_inputs: bool = False, token_rewards: bool = False, posted: bool = False
) -> StageSpec:
    """The reward stage of a run, whose columns are fixed when it is opened.

    Args:
        keep_inputs: Rows keep what was scored, so that they can be scored again.
        token_rewards: The stage reads the tokens and rewards each of them.
        posted: What the agent of a row says of it counts, where it says something.
    """
    reads = list(REWARD_STAGE.reads)
    writes = list(REWARD_STAGE.writes)
    if keep_inputs:
        writes.append(REWARD_INPUTS)
    if token_rewards:
        writes.append(TOKEN_REWARDS)
        reads.append("tokens")
    if posted:
        reads.append(POSTED_REWARD)
    return StageSpec(name=REWARD_STAGE.name, reads=tuple(reads), writes=tuple(writes))


REFERENCE_STAGE = StageSpec(name="reference", reads=("tokens",), writes=REFERENCE_COLUMNS)


class GroupPolicy(StrEnum):
    """When a group of a task counts as complete."""

    ALL = "all"
    K_OF_N = "k_of_n"
    REPLACE_SIBLING = "replace_sibling"


class StalePolicy(StrEnum):
    """Treatment of a task whose rows became older than `max_staleness`."""

    REISSUE = "reissue"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """The declaration of a run. Opening the same run twice with equal specs is opening it once."""

    run: str
    group_size: int
    batch_groups: int
    """Groups of one optimizer step's batch."""
    max_staleness: float
    """Optimizer steps between sampling and training; `math.inf` is fully asynchronous."""
    stages: tuple[StageSpec, ...] = (ROLLOUT_STAGE, REWARD_STAGE)
    """In order. The union of what they write is what a row must have before it can be taken."""
    group_policy: GroupPolicy = GroupPolicy.ALL
    group_k: int = 0
    """For `k_of_n`: how many finished rows make the group complete."""
    stale_policy: StalePolicy = StalePolicy.REISSUE
    max_attempts: int = 3
    """Deliveries of a row to a stage before it is dead-lettered, and re-issues of a stale group before it leaves."""
    lease_ttl_s: float = 5.0
    resident_batches: int = 4
    """Admission bound, in batches, where `max_staleness` is infinite."""
    resident_bytes: int = 4 << 30
    resident_tokens: int = 0
    """Tokens of rows that are admitted and not consumed, beyond which new groups wait; 0 is no bound."""
    sampler: str = "fifo"
    gated: bool = True
    """True: admission and leases follow the published version. False (evaluation): they do not."""
    priority: int = 0
    """A worker that serves several runs is given rows of the highest priority first."""
    vocabulary: int = 0
    """Tokens of rows are less than this. 0: the caller does not know it; until one does, any from 0 on are taken."""

    @property
    def admission_groups(self) -> float:
        """Groups that may be admitted and not yet consumed: `(max_staleness + 1) x batch`."""
        batches = (
            self.resident_batches if math.isinf(self.max_staleness) else self.max_staleness + 1
        )
        return batches * self.batch_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The progress of a run in the queue."""

    spec: RunSpec
    epoch: int
    """0 until a trainer has acquired the run."""
    published: Version
    """The newest version that the fleet has committed."""
    cursor: str
    """The feeder's position, stored with the last admitted task; empty at the start."""
    feed_closed: bool
    committed_step: int
    """The step before which settled rows have left the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Counts of a run's rows by state. `admitted = trained + filtered + stale + dead_lettered + resident`."""

    run: str
    admitted: int
    trained: int
    filtered: Mapping[str, int]
    """Rows by reason."""
    stale: Mapping[str, int]
    dead_lettered: Mapping[str, int]
    resident: Mapping[str, int]
    """Rows by state: queued, leased, pending (between stages), ready, taken, settled."""

    @property
    def left(self) -> int:
        """Rows that are resident no more."""
        parts = (self.filtered, self.stale, self.dead_lettered)
        return self.trained + sum(sum(part.values()) for part in parts)

    @property
    def balanced(self) -> bool:
        """The invariant that no kill may break."""
        return self.admitted == self.left + sum(self.resident.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """One thing that blocks: who waits, for what, since when, and which service to look at."""

    who: str
    what: str
    since_s: float
    owners: tuple[str, ...] = ()
    uids: tuple[Uid, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A row that was given up, with what was tried."""

    uid: Uid
    stage: str
    outcome: Outcome
    reason: str
    attempts: int
    prompt: str = field(default="", compare=False)
    """The beginning of what the row was to answer, for a person; empty in all but the last letters of a long list."""


PROBLEMS_NAMED = 20
"""Problems of one kind that are named singly; the others are counted."""


@dataclass(slots=True, kw_only=True)
class Audit:
    """Result of an audit: counts, and problems."""

    ledgers: dict[str, Ledger] = field(default_factory=dict)
    """Derived from the stored records, by run."""
    records: int = 0
    values: int = 0
    """Entries of PAYLOAD."""
    nbytes: int = 0
    """Keys and values of both tables."""
    problems: list[str] = field(default_factory=list)

    def add_problems(self, problems: Iterable[str]) -> None:
        """Add problems of one kind."""
        new = list(problems)
        self.problems += new[:PROBLEMS_NAMED]
        if len(new) > PROBLEMS_NAMED:
            self.problems.append(f"… and {len(new) - PROBLEMS_NAMED} more like the last one")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """One run of a queue."""

    ledger: Ledger
    opened_by: str
    """The role of the client that opened it; empty if the queue asks for no credentials."""
    epoch: int
    """0: no trainer has acquired it."""
    committed_step: int
    """Optimizer steps of the newest checkpoint."""
    feed_closed: bool
    dead_letters: int
    """Dead letters that are kept, with their tasks."""
    attached: tuple[str, ...]
    """Signs that services work on it, a sentence each; none: it is over, or abandoned."""

    @property
    def run(self) -> str:
        """Its name."""
        return self.ledger.run

    @property
    def loss(self) -> str:
        """The loss with it, in words."""
        rows = sum(self.ledger.resident.values())
        letters = counted(self.dead_letters, "dead letter")
        return f"{counted(rows, 'resident row')}, {letters} and the feeder's position"
