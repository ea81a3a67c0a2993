"""Stand-ins for a model: a judge, and a learner on several ranks.

A token's value is the version that sampled it, so a wrong label shows. The learner's weights are the list of the rows
that it was trained on, so a row that was trained twice shows.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from meshrl.contract.errors import InfraError
from meshrl.contract.ports import Judge
from meshrl.contract.types import (
    Batch,
    Columns,
    Int32,
    Json,
    Outcome,
    Sample,
    Score,
    Trajectory,
    Uid,
    Version,
)
from meshrl.rewardd.judge import score_unposted
from meshrl.trainer.learner.experience import Schedule, schedule
from tests.simulation.engine import STEP_BITS, token_of
from tests.simulation.loop import Blocked, SimulatedLoop

Item = TypeVar("Item", bound=np.generic)
COLUMNS: Final[tuple[str, ...]] = ("tokens", "loss_mask", "rollout_logprobs", "spans", "reward")
"""Columns that the learner reads of every row."""


class Tokenizer:
    """Text is not looked at."""

    def decode(self, ids: Sequence[int]) -> str:
        """Nothing."""
        return ""


class StandInJudge(Judge):
    """Each score belongs to its row, and takes a while."""

    reward_hash = "simulated"

    def __init__(self, seed: int, mean_s: float) -> None:
        self.failing_until = 0.0
        """Samples cannot be scored until then."""
        self._seed = seed
        self._mean_s = mean_s
        self._clock = asyncio.get_running_loop().time

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """0 or 1."""
        draws = [random.Random(f"{self._seed} {s.uid.task} {s.uid.index}") for s in samples]
        await asyncio.sleep(max((draw.expovariate(1 / self._mean_s) for draw in draws), default=0))
        failing = self.failing_until > self._clock()
        return [
            Score(
                uid=sample.uid,
                outcome=Outcome.INFRA_FAULT if failing else Outcome.OK,
                score=float(draw.random() < 0.5),
                reason="simulated",
                reward_hash=self.reward_hash,
            )
            for sample, draw in zip(samples, draws, strict=True)
        ]

    async def close(self) -> None:
        """Nothing to end."""


class PostedFirst:
    """Satisfies `Judge`: what the agent of a row has posted counts, as behind the product's active reward."""

    def __init__(self, judge: StandInJudge) -> None:
        self._judge = judge
        self.reward_hash = judge.reward_hash

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """The posted score, or else the judge's."""
        return await score_unposted(self._judge, samples)

    async def close(self) -> None:
        """Nothing to end."""


class StandInReference:
    """Each log-prob says its token, and takes a while."""

    def __init__(self, takes: Callable[[], asyncio.Future[None]]) -> None:
        self._takes = takes

    async def judged(
        self, rows: Sequence[Int32], seen: Sequence[object], *, temperature: float
    ) -> Sequence[Columns]:
        """The columns of each row."""
        await self._takes()
        return [{"ref_logprobs": -row.astype(np.float32)} for row in rows]


class _Collective:
    """One collective of all ranks."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.values: dict[int, Any] = {}
        self.changed: asyncio.Future[None] = loop.create_future()


class Collectives:
    """The messages between the ranks of one trainer, in one group. A rank that dies ends them."""

    def __init__(self, loop: SimulatedLoop, size: int) -> None:
        self.loop = loop
        self.size = size
        self._calls: list[_Collective] = []
        self._groups: list[Collectives] = []
        self._broken = False

    def group(self, index: int) -> Collectives:
        """Another group of the same ranks."""
        while len(self._groups) <= index:
            self._groups.append(Collectives(self.loop, self.size))
        return self._groups[index]

    def end(self) -> None:
        """A rank is gone."""
        self._broken = True
        for call in self._calls:
            if not call.changed.done():
                call.changed.set_result(None)
        for group in self._groups:
            group.end()

    def exchange(self, number: int, rank: int, value: Any, needed: Sequence[int]) -> list[Any]:
        """The values of the ranks `needed` in collective `number`. Raises Blocked, InfraError."""
        while len(self._calls) <= number:
            self._calls.append(_Collective(self.loop))
        call = self._calls[number]
        if rank not in call.values:
            call.values[rank] = value
            changed, call.changed = call.changed, self.loop.create_future()
            if not changed.done():
                changed.set_result(None)
        if all(rank in call.values for rank in needed):
            return [call.values[rank] for rank in needed]
        if self._broken:
            raise InfraError(f"rank {rank} of {self.size}: a peer rank is gone (simulated)")
        raise Blocked(call.changed)


class StandInWorld:
    """As much of `World` as the loop uses. Work that was `Blocked` runs again: what it had exchanged is known."""

    device = torch.device("cpu")

    def __init__(self, collectives: Collectives, rank: int) -> None:
        self.rank = self.data_rank = rank
        self.size = self.data_size = collectives.size
        self._collectives = collectives
        self._groups = 0
        self._work = (0, 0)
        self._began = 0
        self._next = 0

    @property
    def is_main(self) -> bool:
        """Rank 0 talks to the queue."""
        return self.rank == 0

    def with_own_group(self) -> StandInWorld:
        """The same ranks, for another thread."""
        self._groups += 1
        return StandInWorld(self._collectives.group(self._groups - 1), self.rank)

    def broadcast(self, payload: bytes = b"") -> bytes:
        """Rank 0's payload."""
        if self.size == 1:
            return payload
        [value] = self._collectives.exchange(self._number(), self.rank, payload, [0])
        found: bytes = value
        return found

    def all_gather(self, own: npt.NDArray[Item]) -> list[npt.NDArray[Item]]:
        """Every rank's array."""
        if self.size == 1:
            return [own]
        everybody = range(self.size)
        return self._collectives.exchange(self._number(), self.rank, own, everybody)

    def barrier(self) -> None:
        """Wait for every rank."""
        self.all_gather(np.zeros(1, dtype=np.float32))

    def _number(self) -> int:
        """The number of this collective: the same again when the work that makes it is repeated."""
        work = self._collectives.loop.work
        if work[0] != self._work[0]:
            self._began = self._next
        elif work[1] != self._work[1]:
            self._next = self._began
        self._work = work
        self._next += 1
        return self._next - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRow:
    """One row in the weights."""

    step: int
    uid: Uid
    oldest: Version


@dataclass(slots=True)
class StandInPolicy:
    """The weights: what they were trained on, in order."""

    trained_on: list[TrainedRow] = field(default_factory=list)
    adapter: None = None


class StandInLearner:
    """As much of `Learner` as the loop uses."""

    optimizers = None
    vocabulary = 0
    """Tokens are versions, of any number."""

    def __init__(
        self,
        world: StandInWorld,
        takes: Callable[[], asyncio.Future[None]],
        problem: Callable[[str], None],
        *,
        max_staleness: float,
        reference: bool,
        check: Callable[[Trajectory], None],
    ) -> None:
        """`takes` is the time of one step, as a future that begins now; `problem` hears of wrong rows.

        `check` looks at each row, too.
        """
        self.world = world
        self.policy = StandInPolicy()
        self.kl_coef = 0.0
        self.beside: dict[str, Any] = {}
        self._takes = takes
        self._problem = problem
        self._check = check
        self._max_staleness = max_staleness
        self._reference = reference
        self.columns = (*COLUMNS, "ref_logprobs") if reference else COLUMNS
        self._running: tuple[int, asyncio.Future[None]] | None = None

    def check(self, rows: Sequence[Trajectory]) -> None:
        """Nothing: they have neither pictures nor experts."""

    def schedule(self, batch: Batch) -> Schedule:
        """The real one."""
        return schedule(batch, ranks=self.world.size, max_tokens=64, mini_batch_groups=None)

    def learn(
        self,
        schedule: Schedule,
        rows: Sequence[Trajectory],
        step: int,
        baselines: dict[str, float] | None,
        observe: object = None,
    ) -> dict[str, Json]:
        """One step: every rank looks at its own rows, and all of the batch goes into the weights."""
        if self._running is None or self._running[0] != step:
            self._running = (step, self._takes())
            for row in rows:
                self._check_labels(row, step)
                self._check(row)
        if not self._running[1].done():
            raise Blocked(self._running[1])
        self.world.barrier()
        self.policy.trained_on += [
            TrainedRow(step=step, uid=row.uid, oldest=row.oldest) for row in schedule.rows
        ]
        self._running = None
        return {}

    def _check_labels(self, row: Trajectory, step: int) -> None:
        labels = np.zeros(len(row.tokens), np.int64)
        for span in row.spans:
            labels[span.start : span.end] = token_of(span.version)
        sampled = row.loss_mask.astype(bool)
        if self._reference and not np.array_equal(
            row.ref_logprobs if row.ref_logprobs is not None else (),
            -row.tokens.astype(np.float32),
        ):
            self._problem(f"{row.uid} is trained with log-probs of other tokens")
        wrong = int(np.count_nonzero(labels[sampled] != row.tokens[sampled]))
        if wrong:
            self._problem(f"{row.uid}: {wrong} tokens carry another version than sampled them")
        if not sampled.any():
            return
        oldest = int(np.bitwise_and(row.tokens[sampled], (1 << STEP_BITS) - 1).min())
        if step - oldest > self._max_staleness:
            self._problem(f"{row.uid} has tokens of step {oldest} and is trained at step {step}")
