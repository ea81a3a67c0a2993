"""Batches of a run as a PyTorch IterableDataset. Workers take them, the main process settles them.

    with QueueDataset("127.0.0.1:7001", run="mine", groups=4, step=resumed_at) as dataset:
        for batch in DataLoader(dataset, batch_size=None, num_workers=2):
            ...one optimizer step on batch["tokens"], batch["reward"], ...
            dataset.settle(batch.step)
            with dataset.checkpoint() as step: save(step)

      main process         worker 0                worker 1
      open: acquire        take 0 ─ turn ────────▶ take 1 ─ turn ─▶ …     each has its own connection
      train 0 ◀─────────── fetch 0, tensors        fetch 1, tensors
      settle 0             take 2 …

Workers take ahead of the main process (`prefetch_factor`). Batches that were taken and not settled come again after a
crash. A waiting worker ends when the DataLoader ends it or the main process dies.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeAlias, TypeVar

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from meshrl.client import batches
from meshrl.client.batches import Share
from meshrl.client.event_loop_thread import EventLoopThread
from meshrl.client.queue import DAY_S, RETRY_S, Queue
from meshrl.client.tensors import TensorBatch, to_tensors
from meshrl.contract import ports
from meshrl.contract.errors import EndOfDataError, UserError
from meshrl.contract.types import Batch

T = TypeVar("T")
Ask: TypeAlias = Callable[[ports.Queue], Coroutine[Any, Any, T]]
_NEVER: Final = 1 << 62
LOOK_S: Final = 0.01
"""Seconds between two looks of a worker that waits for its turn."""


class Position(NamedTuple):
    """The position of training, equal on all ranks of one trainer."""

    epoch: int
    step: int
    """Optimizer steps of the checkpoint from which training starts."""


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The settings that a worker needs."""

    address: str
    patience_s: float
    credential: str | Path | None
    run: str
    groups: int
    steps: int | None
    share: Share
    wait_s: float


class QueueDataset(IterableDataset[TensorBatch]):
    """The batches of one run, for its one trainer. Pass it to a DataLoader with `batch_size=None`.

    Args:
        address: As in `Queue.connect`.
        run: The name of an open run.
        groups: Groups of one optimizer step, over all ranks.
        columns: Columns to fetch; all by default.
        step: Optimizer steps of the checkpoint to start from; by default the last committed step.
        steps: End after this many batches; by default when the feed is closed and empty.
        share: This process's rank, the number of ranks, and whether groups stay on one rank. Every rank gets a batch
            for each step; it has no rows if there are fewer groups than ranks.
        position: For ranks other than 0, the `position` of rank 0. Not needed if `torch.distributed` is initialised
            with as many ranks: then rank 0 broadcasts it.
        owner: The trainer's name, for people to read.
        publish: As in `Run.batches`.
        wait_s: Seconds to wait for each batch before WaitTimeoutError.
        patience_s: Seconds for which calls are repeated while the queue restarts.
        credential: As in `Queue.connect`.
    """

    def __init__(
        self,
        address: str,
        *,
        run: str,
        groups: int,
        columns: Sequence[str] | None = None,
        step: int | None = None,
        steps: int | None = None,
        share: Share | None = None,
        position: Position | None = None,
        owner: str = "",
        publish: bool = True,
        wait_s: float = DAY_S,
        patience_s: float = RETRY_S,
        credential: str | Path | None = None,
    ) -> None:
        # Raises for a bad address or credential here rather than in a worker.
        Queue.connect(address, credential=credential)
        self._source = _Source(
            address=address,
            patience_s=patience_s,
            credential=credential,
            run=run,
            groups=groups,
            steps=steps,
            share=share or Share(),
            wait_s=wait_s,
        )
        self._columns = columns
        self._wanted_step = step
        self._owner = owner
        self._publish = publish
        self._position = position
        self._main: _Connection | None = None

    @property
    def position(self) -> Position:
        """Epoch and first step. Raises UserError before `open`."""
        if self._position is None:
            raise UserError("the dataset is not open: use it inside `with QueueDataset(...)`")
        return self._position

    @property
    def step(self) -> int:
        """Optimizer steps settled so far, including those before a resume."""
        return self._settled

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def open(self) -> None:
        """Take the run over (rank 0) and rewind it to the step to resume at.

        No connection stays open, so that DataLoader may fork its workers.

        Raises:
            ConflictError: `step` is older than the last committed step.
            UserError: this rank is not 0 and has no position.
        """
        share = self._source.share
        if self._position is None and share.rank == 0:
            self._position = self._connection().call(self._take_over)
        if self._columns is None:
            state = self._connection().call(lambda port: port.run_state(self._source.run))
            self._columns = batches.all_columns(state)
        self.close()
        if share.world_size > 1 and dist.is_initialized():
            position: list[Position | None] = [self._position]
            dist.broadcast_object_list(position, src=0)
            self._position = position[0]
        if self._position is None:
            raise UserError(
                f"rank {share.rank} needs the position of rank 0: pass position=, or initialise torch.distributed"
            )
        self._settled = self._position.step
        self._turns = _Turns(self._position.step)

    async def _take_over(self, port: ports.Queue) -> Position:
        source = self._source
        state, step = await batches.take_over(
            port,
            source.run,
            owner=self._owner or batches.this_process(),
            step=self._wanted_step,
            publish=self._publish,
        )
        return Position(state.epoch, step)

    def close(self) -> None:
        """Close the connection. Idempotent. The next call connects again."""
        main, self._main = self._main, None
        if main is not None:
            main.close()
            del main
            gc.collect()  # gRPC ends its threads when the last channel is freed

    def _connection(self) -> _Connection:
        if self._main is None:
            self._main = _Connection(self._source)
        return self._main

    def __getstate__(self) -> dict[str, Any]:
        """A worker makes its own connection."""
        return {**self.__dict__, "_main": None}

    def __iter__(self) -> Iterator[TensorBatch]:
        position, info = self.position, get_worker_info()
        workers, number = (info.num_workers, info.id) if info else (1, 0)
        steps = itertools.count(self._settled + number, workers)
        if info is None:
            yield from self._batches(self._connection(), position, steps)
            return
        self._main = None  # in a fork: a copy of the main process's connection
        _end_with_parent()
        own_connection = _Connection(self._source)
        try:
            yield from self._batches(own_connection, position, steps)
        finally:
            own_connection.close()

    def _batches(
        self, queue: _Connection, position: Position, steps: Iterator[int]
    ) -> Iterator[TensorBatch]:
        """The batches of `steps`. All workers together take them in the order of the steps."""
        source, columns, epoch = self._source, tuple(self._columns or ()), position.epoch

        def take(step: int) -> Ask[Batch]:
            groups, wait_s = source.groups, source.wait_s
            return lambda port: batches.take(
                port, source.run, epoch=epoch, step=step, groups=groups, wait_s=wait_s
            )

        def fetch(batch: Batch) -> Ask[batches.TrainBatch]:
            return lambda port: batches.fetch(port, batch, epoch, columns, source.share)

        for step in steps:
            if source.steps is not None and step >= position.step + source.steps:
                return
            if not self._turns.wait(step):
                return
            try:
                batch = queue.call(take(step))
            except EndOfDataError:
                self._turns.end(step)
                return
            self._turns.pass_on(step)
            yield to_tensors(queue.call(fetch(batch)), columns)

    def settle(self, step: int) -> None:
        """Declare that all ranks have trained the batch of `step`. Only rank 0 tells the queue.

        Raises:
            FencedError: another trainer has taken the run over.
        """
        if self._source.share.rank == 0:
            epoch, run = self.position.epoch, self._source.run
            self._connection().call(
                lambda port: batches.settle(port, run, epoch, step, publish=self._publish)
            )
        self._settled = max(self._settled, step + 1)

    @contextmanager
    def checkpoint(self) -> Iterator[int]:
        """A block that saves the trainer's state. Yields the steps settled so far: the value for `step=` on resume.

        If it raises nothing, rank 0 commits: rows of earlier steps never come again.
        """
        step = self._settled
        yield step
        if self._source.share.rank == 0:
            epoch, run = self.position.epoch, self._source.run
            self._connection().call(lambda port: port.commit(run, epoch=epoch, step=step))


class _Connection:
    """A queue client and its event-loop thread."""

    def __init__(self, source: _Source) -> None:
        self._thread = EventLoopThread()
        self._queue = Queue.connect(
            source.address, patience_s=source.patience_s, credential=source.credential
        )
        self._thread.call(self._queue.__aenter__())

    def call(self, ask: Ask[T]) -> T:
        return self._thread.call(ask(self._queue.port))

    def close(self) -> None:
        self._thread.call(self._queue.close())
        self._thread.close()


class _Turns:
    """Lets workers take in turn: step s + 1 when s is taken.

    consumes: nothing. waits for: the worker of the step before. unblocked by: `pass_on`, `end`. If a worker fails or
    dies during its turn, DataLoader ends the others. It may kill one at any point, and with it a lock that it holds:
    so there is none, only the worker whose turn it is writes, and the others look.
    """

    def __init__(self, first: int) -> None:
        # Memory that survives a fork too; that of a "fork" context cannot be sent to a spawned process.
        context = multiprocessing.get_context("spawn")
        self._next = context.Value("q", first, lock=False)
        self._end = context.Value("q", _NEVER, lock=False)

    def wait(self, step: int) -> bool:
        """Returns True when `step` may be taken, False if there is no such step."""
        while self._next.value < step < self._end.value:
            time.sleep(LOOK_S)
        return bool(step < self._end.value)

    def pass_on(self, step: int) -> None:
        """`step` is taken."""
        if self._next.value <= step:  # else an earlier loop took it
            self._next.value = step + 1

    def end(self, step: int) -> None:
        """Make `wait` return False for `step` and later steps."""
        self._end.value = min(self._end.value, step)


def _end_with_parent() -> None:
    """End this worker when the main process dies; else it would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch(sentinel: int) -> None:
        connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, args=(parent.sentinel,), daemon=True).start()
