"""Planted bugs: small overrides of the product's classes, to know what the checks can see.

Each is a mistake that somebody could make. `docs/measurements/simulation-2026-11.md` says which check finds each, and
in which seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from meshrl.contract.errors import UnavailableError
from meshrl.contract.types import (
    Batch,
    GenerateDelta,
    OnUpdate,
    RowBlock,
    RunSpec,
    RunState,
    Task,
    Version,
    WeightManifest,
)
from meshrl.http.gateway.sessions import SessionTable
from meshrl.rollout.agents.session import Address, AgentSession
from meshrl.rollout.containers.box import Box, BoxLimits, Image
from meshrl.rollout.containers.pool import Pool
from meshrl.rollout.ports import UNSERVED
from meshrl.rollout.worker import RolloutWorker
from meshrl.rpc.clients.queue import QueueClient
from meshrl.trainer.checkpoint.checkpoint import TrainerState
from meshrl.trainer.checkpoint.dcp import Tensors
from meshrl.trainer.checkpoint.kept import Keep
from meshrl.trainer.data.feeder import Feeder
from meshrl.trainer.ranks.world import World
from meshrl.transferqueue import sampling
from meshrl.transferqueue.model.columns import Unread
from meshrl.transferqueue.model.group import Grant, Group
from meshrl.transferqueue.model.records import Exit, TakenBatch
from meshrl.transferqueue.model.rows import Stage
from meshrl.transferqueue.model.run import Run
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.store import CommitLog, Store
from meshrl.weights.carriers import shm
from meshrl.weights.coordinator import WeightCoordinator
from meshrl.weights.replica_controller import ReplicaController
from tests.simulation.disk import SimulatedCheckpoints, StoredCheckpoint
from tests.simulation.engine import SimulatedEngine
from tests.simulation.services import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One planted bug."""

    what: str
    """In one line."""
    parts: Parts


def _with_run(kind: type[Run]) -> Parts:
    """The queue with another class of runs."""

    class Planted(TransferQueue):
        def _make_run(self, spec: RunSpec, number: int) -> Run:
            clock = asyncio.get_running_loop().time
            return kind(
                spec,
                number,
                sampler=sampling.build(spec.sampler),
                commit_log=self._commit_log,
                expiry=self._expiry,
                clock=clock,
            )

    return Parts(queue=Planted)


class _KeepsContainers(Pool):
    @asynccontextmanager
    async def box(
        self,
        image: Image,
        *,
        row: str,
        limits: BoxLimits | None = None,
    ) -> AsyncIterator[Box]:
        await self._made(image)
        async with self._places:
            box = await self._take((image, limits or self.limits), row)
            yield box
            await self._close(box)  # not in a `finally`


class _ImpatientLog(CommitLog):
    async def flush(self) -> None:
        return


class _AcknowledgesEarly(TransferQueue):
    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._commit_log = _ImpatientLog(store, self._recover)


class _SettlesInMemory(TransferQueue):
    async def settle(self, run: str, *, epoch: int, step: int, batch_id: str) -> None:
        settling = asyncio.ensure_future(
            super().settle(run, epoch=epoch, step=step, batch_id=batch_id)
        )
        settling.add_done_callback(lambda task: task.cancelled() or task.exception())


class _TakesAnew(TransferQueue):
    _takes = 0

    async def take(
        self, run: str, *, epoch: int, step: int, groups: int, batch_id: str, wait_s: float
    ) -> Batch:
        type(self)._takes += 1
        anew = f"{batch_id}~{self._takes:06}"
        return await super().take(
            run, epoch=epoch, step=step, groups=groups, batch_id=anew, wait_s=wait_s
        )

    async def settle(self, run: str, *, epoch: int, step: int, batch_id: str) -> None:
        known = [b for b in self._run(run).batches if b.startswith(f"{batch_id}~")]
        newest = max(known, default=batch_id)
        await super().settle(run, epoch=epoch, step=step, batch_id=newest)


class _WritesUnderAnyToken(TransferQueue):
    async def write(self, run: str, stage: str, blocks: Sequence[RowBlock]) -> None:
        await super().write(run, stage, [self._held(run, stage, block) for block in blocks])

    def _held(self, run: str, stage: str, write: RowBlock) -> RowBlock:
        state = self._run(run)
        group = state.by_task.get(write.task)
        number = state.stages[stage].number
        mask = sum(1 << index for index in write.indices)
        for grant in group.grants if group is not None else ():
            if grant.stage == number and grant.mask & mask == mask:
                return replace(write, token=grant.token)
        return write


class _AppendsUnderAnyToken(_WritesUnderAnyToken):
    async def write(self, run: str, stage: str, blocks: Sequence[RowBlock]) -> None:
        await TransferQueue.write(self, run, stage, blocks)

    async def append(self, run: str, stage: str, blocks: Sequence[RowBlock]) -> None:
        await super().append(run, stage, [self._held(run, stage, block) for block in blocks])


class _MovesTheCursorEarly(TransferQueue):
    async def admit(self, run: str, tasks: Sequence[Task], *, cursor: str, wait_s: float) -> int:
        count = await super().admit(run, tasks, cursor=cursor, wait_s=wait_s)
        state = self._run(run)
        state.record.cursor = cursor
        state.save()
        return count


class _ForgetsExpiredRows(TransferQueue):
    def _expired(self, grant: Grant) -> None:
        return


class _KnowsNoEpoch(Run):
    def check_epoch(self, epoch: int) -> None:
        return


class _KeepsWhatItSettled(Run):
    def rewind(self, step: int, *rest: Any, **named: Any) -> int:
        return 0


class _CommitsOneStepMore(Run):
    def commit(self, step: int) -> None:
        super().commit(step + 1)


class _LeavesOldBatchesTaken(Run):
    def give_back(self, batches: Sequence[TakenBatch]) -> None:
        super().give_back([batch for batch in batches if batch.settled])


class _RepeatsTokens(Run):
    def grant(self, stage: Stage, worker: str, limit: int) -> list[Unread]:
        self.record.last_token -= self.record.last_token % 2
        return super().grant(stage, worker, limit)


class _CountsStaleRowsTwice(Run):
    def remove_rows(self, group: Group, mask: int, exit_: Exit, reason: str) -> None:
        if exit_ is Exit.STALE:
            self.ledger.leave(1, exit_, reason)
        super().remove_rows(group, mask, exit_, reason)


class _RingsNoBell(Run):
    def offer(self, group: Group) -> None:
        self.complete.add(group)


class _LabelsBatchesByTheirStart(SimulatedEngine):
    """A label is the version at the start of the request."""

    def generate(self, request: Any) -> Any:
        self._labels = getattr(self, "_labels", self.version)
        if not self._running:
            self._labels = self.version
        return super().generate(request)

    def _delta(self, count: int, finish_reason: str) -> GenerateDelta:
        return replace(super()._delta(count, finish_reason), version=self._labels)


class _LabelsAhead(SimulatedEngine):
    """Tokens carry the version that is about to be served."""

    async def commit_weights(self, version: Version, on_update: OnUpdate) -> None:
        self.version = version
        await super().commit_weights(version, on_update)


class _LoadsBucketByBucket(SimulatedEngine):
    """Samples while a version is taken over part by part."""

    async def commit_weights(self, version: Version, on_update: OnUpdate) -> None:
        self._weights = [*self._staged[version][:1], *self._weights[1:]]
        await super().commit_weights(version, on_update)


class _ForgetsItsEpoch(ReplicaController):
    """A replica that joins again believes whoever answers."""

    async def _join_once(self) -> None:
        self._highest_epoch, self._engine.version = 0, None
        await super()._join_once()


class _TellsEarly(WeightCoordinator):
    async def _propose(self) -> None:
        await super()._propose()
        assert self._proposed is not None
        await self._on_committed(self._proposed.version)


class _LeavesWhoJoined(WeightCoordinator):
    async def _propose(self) -> None:
        source = self._offered
        assert source is not None
        await self._transport.send(source, [each.receiver for each in self._candidates()])
        self._proposed = None  # without a word to those that joined it meanwhile
        await super()._propose()

    @property
    def _may_propose(self) -> bool:
        return self._offered is not None


class _ClosesTheSegmentThatItWrites(shm.Carrier):
    def _segment(self, manifest: WeightManifest) -> shm.Segment:
        segment = super()._segment(manifest)
        for old in sorted(self._segments)[: -self._keep]:
            self._segments.pop(old).close()
        return segment


class _KeepsEverySegment(shm.Carrier):
    def _segment(self, manifest: WeightManifest) -> shm.Segment:
        self._keep = 1000
        return super()._segment(manifest)


class _ReportsTheNewestVersion(RolloutWorker):
    async def _rollout(self, row: Any, engine: Any, recorder: Any = None) -> Any:
        result = await super()._rollout(row, engine, recorder)
        facts = getattr(result, "facts", None)
        return (
            result if facts is None else replace(result, facts=facts._replace(oldest=facts.newest))
        )


class _SavesNoObservations(RolloutWorker):
    def __init__(self, *rest: Any, **named: Any) -> None:
        super().__init__(*rest, **named)
        if self.checkpointer is not None:
            record = self.checkpointer.record
            self.checkpointer.record = (  # type: ignore[method-assign]
                lambda row, delta: None if delta.version == UNSERVED else record(row, delta)
            )


class _GivesASessionTwice(SessionTable):
    def hand_over(self, session: AgentSession, address: Address) -> bool:
        claims = [claim for claim in self._claims if not claim.done()]
        for claim in claims[:2]:
            claim.set_result(session)
        return bool(claims)


class _FindsTheNewestSession(SessionTable):
    def find(self, authorization: str, session_id: str | None = None) -> AgentSession:
        found = super().find(authorization, session_id)
        return next(reversed(self._open.values()), found)


class _SkipsAPrompt(Feeder):
    def _start(self, state: RunState) -> int:
        position = super()._start(state)
        return position + 1 if position else 0


class _SettlesOnce(QueueClient):
    async def settle(self, run: str, *, epoch: int, step: int, batch_id: str) -> None:
        retry_s, self._connection.retry_s = self._connection.retry_s, 0.0
        try:
            await super().settle(run, epoch=epoch, step=step, batch_id=batch_id)
        except UnavailableError:
            return
        finally:
            self._connection.retry_s = retry_s


class _AcknowledgesUnwritten(SimulatedCheckpoints):
    def write(
        self, root: Path, tensors: Tensors, state: TrainerState, world: World, *, keep: Keep
    ) -> Path:
        version = Version(state.epoch, state.step)
        sweeps = self._disk.sweeps

        def rename(_: object) -> None:
            if self._disk.sweeps == sweeps:
                self._disk.stored.append(StoredCheckpoint(state, tensors))

        if world.is_main:
            self._takes().add_done_callback(rename)
        return self._path(root, version)


class _ForgetsTheUnsettled(SimulatedCheckpoints):
    def describe(
        self, state: TrainerState, policy: Any, beside: Mapping[str, Any] | None = None
    ) -> TrainerState:
        return replace(super().describe(state, policy, beside), unsettled=())


class _TakesNothingOver(SimulatedCheckpoints):
    def take_over(self, root: Path, epoch: int) -> None:
        return


MUTANTS: Final[Mapping[str, Mutant]] = {
    "early_acknowledgement": Mutant(
        what="the queue answers before a change is durable",
        parts=Parts(queue=_AcknowledgesEarly),
    ),
    "settle_in_memory": Mutant(
        what="`settle` alone is answered before it is durable", parts=Parts(queue=_SettlesInMemory)
    ),
    "take_forgets_batch_id": Mutant(
        what="a repeated `take` gives another batch", parts=Parts(queue=_TakesAnew)
    ),
    "write_under_any_token": Mutant(
        what="a write counts if anybody holds the row", parts=Parts(queue=_WritesUnderAnyToken)
    ),
    "cursor_early": Mutant(
        what="the feeder's position moves before all of its tasks are in",
        parts=Parts(queue=_MovesTheCursorEarly),
    ),
    "expired_rows_forgotten": Mutant(
        what="rows of an expired lease are not given out again",
        parts=Parts(queue=_ForgetsExpiredRows),
    ),
    "no_epoch_fence": Mutant(
        what="a trainer that lost the run is not refused", parts=_with_run(_KnowsNoEpoch)
    ),
    "no_rewind": Mutant(
        what="`rewind` returns nothing to the queue", parts=_with_run(_KeepsWhatItSettled)
    ),
    "commit_off_by_one": Mutant(
        what="`commit` releases the step after the checkpoint", parts=_with_run(_CommitsOneStepMore)
    ),
    "batches_stay_taken": Mutant(
        what="`acquire` leaves an older trainer's batch taken",
        parts=_with_run(_LeavesOldBatchesTaken),
    ),
    "token_repeats": Mutant(
        what="two grants share a fencing token", parts=_with_run(_RepeatsTokens)
    ),
    "stale_counted_twice": Mutant(
        what="the ledger counts a stale group once too often",
        parts=_with_run(_CountsStaleRowsTwice),
    ),
    "lost_wake_up": Mutant(
        what="a complete group wakes no waiting `take`", parts=_with_run(_RingsNoBell)
    ),
    "label_at_start": Mutant(
        what="tokens are labelled with the version at the start of the request",
        parts=Parts(engine=_LabelsBatchesByTheirStart),
    ),
    "label_ahead": Mutant(
        what="tokens are labelled with the version that the engine is about to serve",
        parts=Parts(engine=_LabelsAhead),
    ),
    "mixed_version": Mutant(
        what="an engine samples while it takes a version over part by part",
        parts=Parts(engine=_LoadsBucketByBucket),
    ),
    "commit_without_fence": Mutant(
        what="a replica that joins again believes a trainer whose epoch is over",
        parts=Parts(controller=_ForgetsItsEpoch),
    ),
    "told_early": Mutant(
        what="the queue is told of a version before an engine serves it",
        parts=Parts(coordinator=_TellsEarly),
    ),
    "joiners_left_behind": Mutant(
        what="a version that is replaced keeps the replicas that joined it meanwhile",
        parts=Parts(coordinator=_LeavesWhoJoined),
    ),
    "segment_closed_early": Mutant(
        what="shared memory drops the oldest version even while it is being written",
        parts=Parts(shm=_ClosesTheSegmentThatItWrites),
    ),
    "segments_kept": Mutant(
        what="no version is ever dropped from shared memory", parts=Parts(shm=_KeepsEverySegment)
    ),
    "oldest_is_newest": Mutant(
        what="a row is reported as young as its newest token",
        parts=Parts(worker=_ReportsTheNewestVersion),
    ),
    "observations_unsaved": Mutant(
        what="checkpoints leave out what the policy has observed between its turns",
        parts=Parts(worker=_SavesNoObservations),
    ),
    "container_kept": Mutant(
        what="a row that is cancelled leaves its container", parts=Parts(pool=_KeepsContainers)
    ),
    "session_given_twice": Mutant(
        what="two agents that claim get the same session", parts=Parts(sessions=_GivesASessionTwice)
    ),
    "session_of_another": Mutant(
        what="a request is answered by the newest session, whatever its key says",
        parts=Parts(sessions=_FindsTheNewestSession),
    ),
    "feeder_skips": Mutant(
        what="a feeder that starts again leaves one prompt out", parts=Parts(feeder=_SkipsAPrompt)
    ),
    "settle_not_repeated": Mutant(
        what="a `settle` that broke is not repeated", parts=Parts(client=_SettlesOnce)
    ),
    "checkpoint_early": Mutant(
        what="the queue releases rows before the checkpoint is durable",
        parts=Parts(checkpoints=_AcknowledgesUnwritten),
    ),
    "unsettled_forgotten": Mutant(
        what="a checkpoint without the queue does not say which rows the queue still has",
        parts=Parts(checkpoints=_ForgetsTheUnsettled),
    ),
    "no_sweep": Mutant(
        what="a fenced trainer may still put its checkpoint in place",
        parts=Parts(checkpoints=_TakesNothingOver),
    ),
    "append_under_any_token": Mutant(
        what="an append counts if anybody holds the row",
        parts=Parts(queue=_AppendsUnderAnyToken),
    ),
}
"""Mutants by name."""


def hunt(
    name: str, seeds: Sequence[int], run: Callable[[int, Parts], Sequence[str]]
) -> tuple[int, str] | None:
    """The first of `seeds` in which `run` finds the mutant, and what it says; None: in none."""
    for seed in seeds:
        if problems := run(seed, MUTANTS[name].parts):
            return seed, problems[0]
    return None
