"""What stands in for a model: a paced engine, a judge, a learner on several ranks, a fleet that gets its versions.

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

from meshrl.contract.errors import InfraError, UnavailableError
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import (
    Batch,
    EngineStats,
    GenerateDelta,
    GenerateRequest,
    Json,
    OnUpdate,
    Outcome,
    Sample,
    Score,
    Trajectory,
    Uid,
    Uint8,
    Version,
    WeightManifest,
)
from meshrl.rollout.ports import UNSERVED
from meshrl.rollout.streams import TokenStream
from meshrl.simulation.loop import PROCESS, Blocked, Process, SimulatedLoop
from meshrl.trainer.learner.experience import Schedule, schedule

Item = TypeVar("Item", bound=np.generic)
STEP_BITS: Final = 20
"""A token is `epoch << STEP_BITS | step`."""


def token_of(version: Version) -> int:
    """What an engine at `version` samples."""
    return version.epoch << STEP_BITS | version.step


class Tokenizer:
    """Text is not looked at."""

    def decode(self, ids: Sequence[int]) -> str:
        """Nothing."""
        return ""


class PacedEngine:
    """Satisfies `Engine`: a response takes a time that belongs to its row, in a few deltas."""

    def __init__(self, seconds_of: Callable[[str], float], *, slots: int, deltas: int) -> None:
        """`seconds_of` a request id is how long its whole response takes."""
        self.version = UNSERVED
        self.served = asyncio.Event()
        """It has a version."""
        self.failing_until = 0.0
        """Requests fail until then."""
        self._seconds_of = seconds_of
        self._slots = slots
        self._deltas = deltas
        self._running = 0
        self._tokens = 0
        self._updates = 0
        self._closed = False
        self._answers: dict[asyncio.Task[None], None] = {}
        self._clock = asyncio.get_running_loop().time

    async def start(self) -> None:
        """Nothing to load."""

    async def close(self) -> None:
        """End what runs."""
        self._closed = True
        for answer in list(self._answers):
            answer.cancel()
        await asyncio.gather(*self._answers, return_exceptions=True)

    def serve(self, version: Version) -> None:
        """Sample with `version` from the next token on."""
        if version > self.version:
            self.version = version
            self._updates += 1
            self.served.set()

    async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
        """There are no weights."""

    async def commit_weights(self, version: Version, on_update: OnUpdate) -> None:
        """See `serve`."""
        self.serve(version)

    async def discard_weights(self, version: Version) -> None:
        """There are no weights."""

    def stats(self) -> EngineStats:
        """Never blocks."""
        return EngineStats(
            version=self.version,
            running=self._running,
            capacity=self._slots,
            tokens_generated=self._tokens,
            tokens_per_s=0.0,
            updates=self._updates,
            update_pause_s=0.0,
        )

    def generate(self, request: GenerateRequest) -> TokenStream:
        """Sample one response."""
        stream = TokenStream()
        if self._closed:
            stream.push(UnavailableError("the engine is closed"))
            return stream
        answer = asyncio.create_task(self._answer(request, stream), name="engine-answer")
        self._answers[answer] = None
        answer.add_done_callback(lambda task: self._answers.pop(task, None))
        stream.on_close(lambda: _cancel(answer))
        return stream

    async def _answer(self, request: GenerateRequest, stream: TokenStream) -> None:
        self._running += 1
        try:
            left = request.sampling.max_tokens
            whole = left + request.continued
            pause_s = self._seconds_of(request.request_id) / max(1, whole)
            size = max(1, -(-whole // self._deltas))
            while left > 0:
                count = min(size, left)
                await asyncio.sleep(pause_s * count)
                if self.failing_until > self._clock():
                    stream.push(InfraError("simulated: the engine failed"))
                    return
                left -= count
                self._tokens += count
                stream.push(self._delta(count, "" if left else "length"))
            if not request.sampling.max_tokens:
                stream.push(self._delta(0, "length"))
        finally:
            self._running -= 1

    def _delta(self, count: int, finish_reason: str) -> GenerateDelta:
        return GenerateDelta(
            tokens=np.full(count, token_of(self.version), np.int32),
            logprobs=np.zeros(count, np.float32),
            version=self.version,
            finish_reason=finish_reason,
        )


def _cancel(answer: asyncio.Task[None]) -> None:
    answer.cancel()


class StandInJudge:
    """Satisfies `Judge`: each score belongs to its row, and takes a while."""

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
        """Of this collective: the same again when the work that makes it is repeated."""
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

    columns = ("tokens", "loss_mask", "rollout_logprobs", "spans", "reward")
    optimizers = None

    def __init__(
        self,
        world: StandInWorld,
        takes: Callable[[], asyncio.Future[None]],
        problem: Callable[[str], None],
        *,
        max_staleness: float,
    ) -> None:
        """`takes` is the time of one step, as a future that begins now; `problem` hears of wrong rows."""
        self.world = world
        self.policy = StandInPolicy()
        self.kl_coef = 0.0
        self.beside: dict[str, Any] = {}
        self._takes = takes
        self._problem = problem
        self._max_staleness = max_staleness
        self._running: tuple[int, asyncio.Future[None]] | None = None

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
        wrong = int(np.count_nonzero(labels[sampled] != row.tokens[sampled]))
        if wrong:
            self._problem(f"{row.uid}: {wrong} tokens carry another version than sampled them")
        if not sampled.any():
            return
        oldest = int(np.bitwise_and(row.tokens[sampled], (1 << STEP_BITS) - 1).min())
        if step - oldest > self._max_staleness:
            self._problem(f"{row.uid} has tokens of step {oldest} and is trained at step {step}")


@dataclass(frozen=True, slots=True)
class StandInSnapshot:
    """A version without bytes."""

    version: Version

    @property
    def manifest(self) -> WeightManifest:
        """Nobody reads it."""
        raise NotImplementedError

    def bucket(self, index: int) -> Uint8:
        """Nobody reads it."""
        raise NotImplementedError


class Fleet:
    """The engines of the mesh, and the version that all should serve."""

    def __init__(self, silent: Callable[[Process | None], bool]) -> None:
        self._silent = silent
        self.engines: dict[Process, PacedEngine] = {}
        self.committed = UNSERVED

    def join(self, engine: PacedEngine) -> None:
        """An engine of the process that runs."""
        process = PROCESS.get()
        assert process is not None
        self.engines[process] = engine
        process.on_death[lambda: self.engines.pop(process, None)] = None

    def leave(self) -> None:
        """The process that runs has no engine any more."""
        process = PROCESS.get()
        if process is not None:
            self.engines.pop(process, None)

    def reach(self) -> None:
        """Bring the committed version to every engine that can be reached."""
        for process, engine in self.engines.items():
            if not self._silent(process):
                engine.serve(self.committed)


class StandInPublisher:
    """Satisfies `Publisher`: one version in transfer, for a while; then the fleet serves it and the queue hears."""

    def __init__(
        self,
        fleet: Fleet,
        transfer_s: Callable[[], float],
        on_committed: Callable[[Version], Any],
    ) -> None:
        self._fleet = fleet
        self._transfer_s = transfer_s
        self._on_committed = on_committed
        self._transfer: asyncio.Task[None] | None = None

    async def publish(self, source: WeightSource) -> None:
        """Wait for the version before, then begin."""
        await self.drained()
        assert isinstance(source, StandInSnapshot)
        self._transfer = asyncio.create_task(self._send(source.version), name="transfer")

    async def drained(self) -> None:
        """Wait for the transfer."""
        if self._transfer is not None:
            await self._transfer

    async def _send(self, version: Version) -> None:
        await asyncio.sleep(self._transfer_s())
        self._fleet.committed = max(self._fleet.committed, version)
        self._fleet.reach()
        await self._on_committed(version)
