"""Batches for your own trainer. In the surviving history each batch is trained once.

    async for batch in (batches := run.batches(groups=4, step=resumed_at)):
        ...one optimizer step...                       asking for the next batch settles this one
        async with batches.checkpoint() as step:       settles it now
            save(step)                                 at the end without an error: commits the earlier steps

A trainer that died resumes with the step of its last checkpoint. Batches settled at or after that step, and batches
taken and not settled, come again in the same order. Earlier ones do not come again.
"""

from __future__ import annotations

import heapq
import os
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from meshrl.contract.errors import EndOfDataError, UserError
from meshrl.contract.frames import Flat
from meshrl.contract.ports import Queue
from meshrl.contract.rows import trajectory
from meshrl.contract.types import (
    Batch,
    BatchRow,
    Columns,
    RowBlock,
    RunState,
    Trajectory,
    Uid,
    Version,
    blocks_of,
    gathered,
)


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Complete groups with their payload, in the manifest's order. Rows of one group are adjacent."""

    epoch: int
    step: int
    """The optimizer step that the batch is for."""
    rows: tuple[BatchRow, ...]
    groups: tuple[RowBlock, ...]
    """The payload of `rows`, in the frames in which it was written."""

    @cached_property
    def columns(self) -> tuple[Columns, ...]:
        """For each row a mapping from column name to a read-only array. Raises CorruptError."""
        return tuple(row for group in self.groups for row in group.columns())

    def column(self, name: str) -> Flat:
        """One column of all rows, concatenated (copied once). Raises CorruptError if a row lacks it."""
        return self.flat((name,))[name]

    def flat(self, names: Sequence[str]) -> dict[str, Flat]:
        """Several at once, which takes less time than one after the other. Raises as `column`."""
        if not self.groups:
            raise UserError(f"this share of the batch has no rows, so no column {names[0]!r}")
        return gathered(self.groups, names)

    def trajectories(self) -> tuple[Trajectory, ...]:
        """The rows as Trajectory objects, for runs with the standard stages. Raises CorruptError."""
        pairs = zip(self.rows, self.columns, strict=True)
        return tuple(trajectory(row.uid, columns) for row, columns in pairs)


async def take(
    port: Queue, run: str, *, epoch: int, step: int, groups: int, wait_s: float
) -> Batch:
    """The batch of a step. Every rank and worker that asks in one epoch gets the same batch."""
    return await port.take(
        run, epoch=epoch, step=step, groups=groups, batch_id=f"{epoch}-{step}", wait_s=wait_s
    )


async def fetch(
    port: Queue, batch: Batch, epoch: int, columns: Sequence[str], share: Share
) -> TrainBatch:
    """The payload of a rank's share of a batch."""
    rows = share.rows_of(batch)
    groups = await port.fetch(batch.run, blocks_of(batch.run, (row.uid for row in rows)), columns)
    return TrainBatch(epoch=epoch, step=batch.step, rows=rows, groups=tuple(groups))


def all_columns(state: RunState) -> tuple[str, ...]:
    """Every column that a stage of the run writes."""
    return tuple(dict.fromkeys(name for stage in state.spec.stages for name in stage.writes))


def this_process() -> str:
    """`host:pid`: the default name of a row's holder or a run's trainer."""
    return f"{socket.gethostname()}:{os.getpid()}"


async def take_over(
    port: Queue, run: str, *, owner: str, step: int | None, publish: bool
) -> tuple[RunState, int]:
    """Become the trainer of a run, rewound to `step`, by default the last committed one; returns that, too.

    Raises:
        ConflictError: `step` is older than the last committed step.
    """
    state = await port.acquire(run, owner)
    at = state.committed_step if step is None else step
    await port.rewind(run, epoch=state.epoch, step=at)
    if publish:
        await port.publish(run, Version(state.epoch, at))
    return state, at


class Batches:
    """An async iterator over a run's batches, for its one trainer. `Run.batches` makes it."""

    def __init__(
        self,
        port: Queue,
        run: str,
        *,
        begin: Callable[[], Awaitable[tuple[RunState, int]]],
        groups: int,
        columns: Sequence[str] | None,
        steps: int | None,
        publish: bool,
        wait_s: float,
    ) -> None:
        """`begin` is `take_over` with its arguments."""
        self._port = port
        self._run = run
        self._groups = groups
        self._columns = columns
        self._begin = begin
        self._step: int | None = None
        self._steps = steps
        self._publish = publish
        self._wait_s = wait_s
        self._epoch: int | None = None
        self._open: TrainBatch | None = None
        self._again = False
        self._done = 0

    @property
    def epoch(self) -> int:
        """The trainer's epoch. Trainers of older epochs are fenced. Raises UserError before `start`."""
        if self._epoch is None:
            raise UserError("the run has not been taken over yet: iterate, or call `start`")
        return self._epoch

    @property
    def step(self) -> int:
        """Optimizer steps settled so far, including those before a resume."""
        if self._step is None:
            raise UserError("the run has not been taken over yet: iterate, or call `start`")
        return self._step

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are fetched. Known after `start`."""
        return tuple(self._columns or ())

    async def start(self) -> None:
        """Take the run over and rewind it to the step to resume at. The first iteration does this. Idempotent.

        Raises:
            ConflictError: `step` is older than the last committed step.
        """
        if self._epoch is not None:
            return
        state, step = await self._begin()
        if self._columns is None:
            self._columns = all_columns(state)
        self._epoch, self._step = state.epoch, step

    def __aiter__(self) -> Self:
        """A loop that continues after `break` first gets its unsettled batch again."""
        self._again = self._open is not None
        return self

    async def __anext__(self) -> TrainBatch:
        await self.start()
        if self._again and self._open is not None:
            self._again = False
            return self._open
        await self.settle()
        if self._steps is not None and self._done >= self._steps:
            raise StopAsyncIteration
        try:
            batch = await take(
                self._port,
                self._run,
                epoch=self.epoch,
                step=self.step,
                groups=self._groups,
                wait_s=self._wait_s,
            )
        except EndOfDataError:
            raise StopAsyncIteration from None
        self._open = await fetch(self._port, batch, self.epoch, self.columns, Share())
        return self._open

    async def settle(self) -> None:
        """Declare that the current batch was trained. Does nothing without a current batch.

        Raises:
            FencedError: another trainer has taken the run over.
        """
        if self._open is not None:
            await settle(self._port, self._run, self.epoch, self._open.step, publish=self._publish)
            self._step = self._open.step + 1
            self._open = None
            self._done += 1

    async def filter(self, uids: Sequence[Uid], reason: str) -> None:
        """Remove rows of the current batch from the run untrained, counted under `reason`."""
        await self._port.filter(self._run, epoch=self.epoch, uids=uids, reason=reason)

    def checkpoint(self) -> Checkpoint:
        """A block that saves the trainer's state. Settles at its start, commits at its end if it raises nothing."""
        return Checkpoint(self)

    async def commit(self, step: int) -> None:
        """Declare that a checkpoint with `step` optimizer steps is durable. Earlier rows never come again."""
        await self._port.commit(self._run, epoch=self.epoch, step=step)


class Checkpoint:
    """`async with batches.checkpoint() as step: save(step)`.

    It settles before the save, so that a trainer killed between the two finds the rows of its checkpoint settled. It
    commits after the save, so that a trainer killed before the save finds them ready again.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    async def __aenter__(self) -> int:
        """Returns the optimizer steps that the checkpoint will hold: the value for `step=` on resume."""
        await self._batches.start()
        await self._batches.settle()
        return self._batches.step

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            await self._batches.commit(self._batches.step)


async def settle(port: Queue, run: str, epoch: int, step: int, *, publish: bool) -> None:
    """Declare that the batch of `step` was trained. With `publish`, publish version `step + 1`."""
    await port.settle(run, epoch=epoch, step=step, batch_id=f"{epoch}-{step}")
    if publish:
        await port.publish(run, Version(epoch, step + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of every batch."""

    rank: int = 0
    world_size: int = 1
    whole_groups: bool = True
    """Keep the rows of a group on one rank, for advantages that compare them. False balances better."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UserError(f"rank {self.rank} is not below world_size {self.world_size}")

    def rows_of(self, batch: Batch) -> tuple[BatchRow, ...]:
        """This rank's rows in the batch's order. Empty if there are fewer groups than ranks.

        Assigns the longest first to the least loaded rank (LPT, Graham 1969: at most 4/3 of the best makespan in
        tokens).
        """
        if self.world_size == 1:
            return batch.rows
        units: dict[object, list[int]] = defaultdict(list)
        for index, row in enumerate(batch.rows):
            units[row.group if self.whole_groups else index].append(index)
        tokens = {key: sum(batch.rows[i].num_tokens for i in unit) for key, unit in units.items()}
        heap = [(0, rank) for rank in range(self.world_size)]
        indices: list[int] = []
        for key in sorted(units, key=lambda key: (-tokens[key], units[key][0])):
            load, rank = heapq.heappop(heap)
            heapq.heappush(heap, (load + tokens[key], rank))
            if rank == self.rank:
                indices += units[key]
        return tuple(batch.rows[index] for index in sorted(indices))
