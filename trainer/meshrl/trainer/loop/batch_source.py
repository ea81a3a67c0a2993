"""The next batch or command, the same on every rank: rank 0 waits for it and broadcasts it.

Rows of a batch that cannot be read, or not be computed with, become dead letters, and the rest is trained: the store
has damaged them since they were taken, or values got in that no row may have. They would end the step of the whole
batch, of this trainer and of each one after it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, TypeAlias

import numpy as np

from meshrl.contract.errors import (
    AWAY,
    CorruptError,
    EndOfDataError,
    MeshError,
    WaitTimeoutError,
)
from meshrl.contract.ports import Publisher, Queue
from meshrl.contract.row_values import row_fault
from meshrl.contract.rows import DAMAGED, FAILED, UNTRAINABLE, trajectory
from meshrl.contract.types import Batch, Columns, Json, Trajectory, Uid
from meshrl.trainer.learner.experience import batch_from_json, batch_to_json
from meshrl.trainer.loop.context import RunContext
from meshrl.trainer.loop.dynamic_sampling import DynamicSampling
from meshrl.trainer.loop.reward_guard import BatchQueue, RewardVersionGuard
from meshrl.trainer.loop.status import LiveStatus
from meshrl.trainer.ranks.world import Compute, World

log = logging.getLogger(__name__)
TELL_S = 10.0
"""How long a trainer that fails tries to tell the queue of what."""
MOST_OF_A_REASON = 300
"""Characters of an error that a dead letter keeps."""
MALFORMED = (CorruptError, ValueError, TypeError, LookupError, RecursionError)
"""Errors of reading columns of another form."""


class LoopCommand(Enum):
    """Command to a rank when there is no batch."""

    END = "end"
    """End: the data have ended, no batch will come."""
    DRAIN = "drain"
    """End this process; the run continues another time."""


NextWork: TypeAlias = Batch | LoopCommand


class BatchSource:
    """Gives each rank the same next batch or command.

    consumes: manifests, the request to drain. waits for: complete groups; the other ranks wait for rank 0's
    broadcast, at most `take_wait_s`. unblocked by: the queue, `leave`. produces: batches, commands.
    """

    def __init__(
        self,
        context: RunContext,
        status: LiveStatus,
        publisher: Publisher,
        rewards: RewardVersionGuard | None = None,
    ) -> None:
        settings, queue = context.settings, context.queue
        self._settings = settings
        self._publisher = publisher
        self._queue = queue
        self._batches: BatchQueue = rewards or queue
        self._rewards = rewards
        self._world = context.learner.world
        self._compute = context.compute
        self._status = status
        self._leaving = False
        """No batch is wanted any more."""
        self._given_up: MeshError | None = None
        self._interrupt = asyncio.Event()
        self._sampling = DynamicSampling(
            queue,
            self._batches,
            settings.run,
            settings.filter_groups,
            groups=settings.batch_groups,
            extra_rows=settings.extra_rows,
        )

    def leave(self) -> None:
        """Give no further batch but the command to drain; a wait under way ends."""
        self._leaving = True
        self._interrupt.set()

    async def next(self, epoch: int, step: int) -> NextWork:
        """The batch of optimizer step `step`, or a command.

        Raises:
            FencedError: another trainer took the run over.
        """
        if not self._world.is_main:
            return await self._listen()
        work: NextWork = LoopCommand.DRAIN
        if self._given_up is not None:
            pass
        elif self._settings.total_steps is not None and step >= self._settings.total_steps:
            work = LoopCommand.END
        else:
            with self.giving_up():
                work = await self._take(epoch, step)
        if isinstance(work, Batch):
            rewards = self._rewards.to_json() if self._rewards else {}
            await self._broadcast(
                {"command": "batch", "batch": batch_to_json(work), "rewards": rewards}
            )
        else:
            await self._broadcast({"command": work.value})
        return work

    def give_up(self, error: MeshError) -> None:
        """End training because a service is unavailable: no batch follows, and the trained state is saved."""
        self._given_up = self._given_up or error
        log.warning("run %s: ending with a checkpoint: %s", self._settings.run, error)

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """Give up when the work inside finds the queue unavailable. On rank 0."""
        try:
            yield
        except AWAY as error:
            self.give_up(error)

    def check(self) -> None:
        """Raise what made this give up, unless it was to drain anyway."""
        if self._given_up is not None and not self._leaving:
            raise self._given_up

    async def settle(self, batch: Batch, epoch: int) -> tuple[str, ...]:
        """Tell the queue that the batch of `next` is in the weights.

        Returns, on every rank, what the queue did not hear of: the ids of all takes of the step, or none.
        """
        unsettled: tuple[str, ...] = ()
        if self._world.is_main:
            unsettled = self._sampling.batch_ids
            with self.giving_up():
                await self._sampling.settle(batch, epoch)
                unsettled = ()
        if self._world.size == 1:
            return unsettled
        message = json.dumps(unsettled).encode()
        return tuple(json.loads(await self._compute.run(lambda: self._world.broadcast(message))))

    async def drop(self, damaged: Mapping[Uid, str], epoch: int) -> None:
        """Drop unreadable rows of the batch of `next`: their groups are in no batch of the step. On rank 0."""
        await dead_letter(self._queue, self._settings.run, epoch, damaged)
        self._sampling.drop(damaged)

    async def tell_of_failure(self, batch: Batch, epoch: int, error: Exception) -> None:
        """Report that the step of this batch, one group, failed by its data: an available queue counts that."""
        reason = f"{FAILED}: {type(error).__name__}: {error}"[:MOST_OF_A_REASON]
        try:
            async with asyncio.timeout(TELL_S):
                await self._queue.filter(
                    self._settings.run,
                    epoch=epoch,
                    uids=[row.uid for row in batch.rows],
                    reason=reason,
                )
        except (MeshError, TimeoutError) as untold:
            log.warning(
                "step %d: the failure could not be reported to the queue: %s",
                batch.step + 1,
                untold,
            )

    @property
    def metrics(self) -> dict[str, Json]:
        """How the last batch was put together."""
        return self._sampling.metrics

    async def keep_ranks_waiting(self, work: Awaitable[None]) -> None:
        """Await rank 0's `work` and tell the other ranks every `take_wait_s` to continue waiting."""
        if self._world.size == 1 or not self._world.is_main:
            await work
            return
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=self._settings.trainer.take_wait_s))[0]:
                await self._broadcast({"command": "waiting"})
            task.result()
        finally:
            task.cancel()

    async def _listen(self) -> NextWork:
        while True:
            message = json.loads(await self._compute.run(self._world.broadcast))
            if message["command"] == "batch":
                if self._rewards:
                    self._rewards.load_json(message["rewards"])
                return batch_from_json(message["batch"])
            if message["command"] != "waiting":
                return LoopCommand(message["command"])

    async def _take(self, epoch: int, step: int) -> NextWork:
        """Wait for a batch in bounded waits; after each, report what blocks."""
        run, sampling = self._settings.run, self._sampling
        sampling.begin(epoch, step)
        while True:
            self._interrupt.clear()
            if self._leaving:
                log.info("run %s: draining before step %d", run, step + 1)
                return LoopCommand.DRAIN
            taking = asyncio.ensure_future(
                self._batches.take(
                    run,
                    epoch=epoch,
                    step=step,
                    groups=sampling.wanted,
                    batch_id=sampling.batch_id,
                    wait_s=self._settings.trainer.take_wait_s,
                )
            )
            try:
                if await self._done_before_interrupt(taking):
                    taken = taking.result()
                    if await sampling.add(taken) and sampling.batch.rows:
                        return sampling.batch
            except WaitTimeoutError:
                await self._check_delivery()
                await self._report_waits()
                await self._broadcast({"command": "waiting"})
            except CorruptError:
                if not await self._drop_unjudged(epoch, step):
                    raise
            except EndOfDataError as error:
                if sampling.batch.rows:
                    return sampling.batch
                log.info("run %s: the data end before step %d: %s", run, step + 1, error)
                return LoopCommand.END

    async def _drop_unjudged(self, epoch: int, step: int) -> bool:
        """Drop the unreadable rows of the last take, which is not judged yet; False if there is none."""
        run, sampling = self._settings.run, self._sampling
        taken = await self._queue.take(
            run,
            epoch=epoch,
            step=step,
            groups=sampling.wanted,
            batch_id=sampling.batch_id,
            wait_s=self._settings.trainer.take_wait_s,
        )
        damaged = await unreadable(
            lambda uids: self._queue.fetch_rows(run, uids, ("response_text", "reward")),
            (row.uid for row in taken.rows),
        )
        await dead_letter(self._queue, run, epoch, damaged)
        return bool(damaged)

    async def _done_before_interrupt(self, taking: asyncio.Future[Batch]) -> bool:
        """False when an interrupt came first. A batch that a cancelled take got is given again: same batch_id."""
        interrupt = asyncio.ensure_future(self._interrupt.wait())
        try:
            both: set[asyncio.Future[Any]] = {taking, interrupt}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            return taking.done()
        finally:
            for future in (taking, interrupt):
                future.cancel()
            await asyncio.gather(taking, interrupt, return_exceptions=True)

    async def _check_delivery(self) -> None:
        """Raise what kept the last version from the fleet, if something did.

        At a staleness of 0 nobody samples rows before that version is there, and no later `publish` would raise it.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(0):  # of a version in transfer there is nothing to say
                await self._publisher.drained()

    async def _report_waits(self) -> None:
        run = self._settings.run
        waiting = await self._queue.why_waiting(run)
        self._status.blocked(waiting)
        for wait in waiting[:3]:
            owners = ", ".join(wait.owners) or "nobody"
            log.info(
                "run %s waits: %s, %s for %.0f s (%s)",
                run,
                wait.who,
                wait.what,
                wait.since_s,
                owners,
            )
        if not waiting:
            log.info("run %s waits for a batch; the queue names nothing that blocks", run)

    async def _broadcast(self, message: Mapping[str, Json]) -> None:
        await self._compute.run(lambda: self._world.broadcast(json.dumps(message).encode()))


class UntrainableError(CorruptError):
    """A row came as it was written, and no step can be computed from it."""


def trainable(uid: Uid, columns: Columns, *, vocabulary: int) -> Trajectory:
    """A row's columns as a Trajectory that a step can be computed from. Raises UntrainableError."""
    if fault := row_fault(columns, vocabulary=vocabulary):
        raise UntrainableError(f"row {uid}: {fault}")
    try:
        row = trajectory(uid, columns)
    except MALFORMED as error:
        raise UntrainableError(f"row {uid}: {error}") from error
    if row.reward is None:
        raise UntrainableError(f"row {uid}: it has no reward")
    for part in row.parts:
        if part.seat and part.seat not in row.reward_components:
            raise UntrainableError(f"row {uid}: no reward component {part.seat!r}, a trained seat")
    for start in {0, *(part.start for part in row.parts)}:
        if row.loss_mask[start : start + 1].any():
            # It has no context that it could have been sampled from.
            raise UntrainableError(
                f"row {uid}: column loss_mask holds 1 at {start}, where a sequence begins: want 0"
            )
    return row


async def unreadable(
    read: Callable[[list[Uid]], Awaitable[object]], uids: Iterable[Uid]
) -> dict[Uid, str]:
    """Rows for which `read` raises CorruptError, with the reason; each is read by itself."""
    found: dict[Uid, str] = {}
    for uid in uids:
        try:
            await read([uid])
        except CorruptError as error:
            kind = UNTRAINABLE if isinstance(error, UntrainableError) else DAMAGED
            found[uid] = f"{kind}: {error.message}"
    return found


async def of_all_ranks(
    world: World, compute: Compute, damaged: Mapping[Uid, str], away: str
) -> tuple[dict[Uid, str], str]:
    """The damaged rows of all ranks, and why any rank could not read now (else empty); on every rank."""
    own = ({str(uid): fault for uid, fault in damaged.items()}, away)
    text = np.frombuffer(json.dumps(own).encode(), np.uint8)
    parts = await compute.run(lambda: world.all_gather(text))
    all_ranks = [json.loads(bytes(part)) for part in parts]
    faults = {Uid.parse(uid): fault for rank, _ in all_ranks for uid, fault in rank.items()}
    return faults, next((why for _, why in all_ranks if why), "")


async def dead_letter(queue: Queue, run: str, epoch: int, damaged: Mapping[Uid, str]) -> None:
    """Tell the queue which rows of its batches cannot be read or computed with, and why."""
    by_reason: defaultdict[str, list[Uid]] = defaultdict(list)
    for uid, reason in damaged.items():
        log.error("%s", reason)
        by_reason[reason].append(uid)
    for reason, uids in by_reason.items():
        await queue.filter(run, epoch=epoch, uids=uids, reason=reason)
