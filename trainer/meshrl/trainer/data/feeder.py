"""The feeder: admits prompts to the queue in a seeded order, as fast as admission allows.

consumes: a prompt set. waits for: room in the queue, space on its disk. unblocked by: a published version, space, or
`stop`.
produces: tasks. Its position lives in the queue, stored in one transaction with the tasks, so a feeder that is
killed and restarted skips nothing and repeats nothing. With `levels` the position says what was drawn of each.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from meshrl.common import tracing
from meshrl.common.plugins import load
from meshrl.contract.errors import NotFoundError, UserError, WaitTimeoutError
from meshrl.contract.ports import Queue
from meshrl.contract.types import RunState, Task, Uid
from meshrl.trainer.data.prompt_streams import LevelHistory, LevelStream, MixedStream
from meshrl.trainer.data.prompts import Prompt, PromptSet

log = logging.getLogger(__name__)

CURRICULA = "meshrl.trainer.data.curricula"
Order: TypeAlias = Callable[[Sequence[Prompt], int, int], Sequence[int]]
"""From the prompts, the epoch and the seed to the places of the prompts in the order in which they are asked. It must
be a pure function: a feeder that is started again asks it again."""
CHUNK = 64
"""Tasks per admit call."""
ADMIT_WAIT_S = 30.0
"""Length of one wait for admission; waits repeat without end, and the queue's why_waiting shows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOrder:
    """Which prompts an epoch asks, and in which order."""

    shuffle: bool
    """Another order in every epoch."""
    seed: int
    curriculum: str | None = None
    """Orders each epoch instead of `shuffle`; see `meshrl.trainer.data.curricula`."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Shares of the sources in each epoch; see `MixedStream`. Empty: every prompt once."""
    levels: LevelStream | None = None
    """Prompts of the level that each task has now, instead of all."""


class Feeder:
    """Feeds one run: `epochs` passes over the prompts, or passes without end when it is None."""

    def __init__(
        self,
        queue: Queue,
        run: str,
        prompts: PromptSet,
        make_task: Callable[[Prompt, str], Task],
        *,
        epochs: int | None,
        order: PromptOrder,
        chunk: int = CHUNK,
        accept_changes: bool = False,
    ) -> None:
        """Prepare; nothing is admitted before `run`.

        Args:
            queue: Receiver of tasks.
            run: The run that they belong to.
            prompts: The prompts.
            make_task: From a prompt and a task id to a task.
            epochs: Passes over the prompts; None: without end.
            order: Order of an epoch.
            chunk: Tasks per call.
            accept_changes: Continue with other prompts, or in another order, than before: from their beginning.

        Raises:
            ConfigError: no such curriculum. UserError: the weights do not fit the prompts.
        """
        self.position = 0
        self._began = 0
        """The position at which these prompts, in this order, were begun."""
        self._first_turn = 0
        """The number of the first pass over them in the names of tasks, which none of other prompts has."""
        self._accept_changes = accept_changes
        self._queue = queue
        self._run = run
        self._prompts = prompts
        self._make_task = make_task
        self._total = None if epochs is None else epochs * len(prompts.prompts)
        self._order = order
        levels, curriculum = order.levels, order.curriculum
        # A chunk has the levels that were in force when it was begun.
        self._chunk = min(chunk, levels.batch) if levels else chunk
        self._curriculum: Order | None = (
            load(CURRICULA, curriculum, "order") if curriculum else None
        )
        self._mixture: MixedStream | None = None
        if order.weights:
            self._mixture = MixedStream(
                prompts.prompts, order.weights, shuffle=order.shuffle, seed=order.seed
            )
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """End `run`; the feed stays open for the next feeder."""
        self._stop.set()

    async def run(self) -> None:
        """Feed until all tasks are admitted, then close the feed.

        Raises:
            UserError: the queue's position belongs to other data or another seed.
        """
        state = await self._queue.run_state(self._run)
        if state.feed_closed:
            return
        self.position = self._start(state)
        if state.cursor != self._cursor(self.position):
            await self._admit(
                []
            )  # before the first task: whose data a task was is known from then on
        tasks = self._tasks(self.position)
        waiting: list[Task] = []
        while not self._stop.is_set():
            # The position is stored when a whole chunk is in, so a chunk is finished before the next one starts.
            if self._order.levels and not waiting:
                await self._follow_scores(self._order.levels)
            waiting = waiting or list(itertools.islice(tasks, self._chunk))
            if not waiting:
                await self._close()
                return
            admitted = await self._admit(waiting)
            self.position += admitted
            del waiting[:admitted]

    async def _follow_scores(self, levels: LevelStream) -> None:
        """Take the levels that evaluations decided, and store them before a task is made by them."""
        try:
            evaluation = await self._queue.run_state(levels.evaluation)
        except NotFoundError:
            return  # the trainer has not opened it yet
        if levels.adopt(LevelHistory.parse(evaluation.cursor), self.position):
            cursor = self._cursor(self.position)
            await self._queue.admit(self._run, [], cursor=cursor, wait_s=ADMIT_WAIT_S)

    async def _admit(self, tasks: list[Task]) -> int:
        """Number of admitted tasks; 0 after a timeout or when stopped."""
        cursor = self._cursor(self.position + len(tasks))
        asking = asyncio.ensure_future(
            self._queue.admit(self._run, tasks, cursor=cursor, wait_s=ADMIT_WAIT_S)
        )
        began = time.time_ns()
        try:
            admitted = asking.result() if await self._unless_stopped(asking) else 0
        except WaitTimeoutError:
            return 0
        if tracing.is_on():
            uids = (
                Uid(self._run, task.task_id, index)
                for task in tasks[:admitted]
                for index in range(task.group_size)
            )
            tracing.record_rows("admit", uids, began, root=True)
        return admitted

    async def _close(self) -> None:
        if await self._unless_stopped(asyncio.ensure_future(self._queue.close_feed(self._run))):
            log.info("fed %d prompts, the feed is closed", self.position)

    async def _unless_stopped(self, asking: asyncio.Future[Any]) -> bool:
        """True once the queue has answered; False when stopped, then the call is cancelled. Raises what it raises."""
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            both: set[asyncio.Future[Any]] = {asking, stopping}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                asking.result()
            return asking.done()
        finally:
            asking.cancel()
            stopping.cancel()
            await asyncio.gather(asking, stopping, return_exceptions=True)

    def _tasks(self, start: int) -> Iterator[Task]:
        """The tasks from position `start` on, without end or up to the last epoch."""
        left = None if self._total is None else max(0, self._total - start)
        for turn, place in itertools.islice(self._places(start - self._began), left):
            prompt = self._prompts.prompts[place]
            yield self._make_task(prompt, f"{self._first_turn + turn}-{prompt.index}")

    def _places(self, start: int) -> Iterator[tuple[int, int]]:
        """Epoch and place of each prompt, from position `start` on."""
        size = len(self._prompts.prompts)
        while self._order.levels:
            yield self._order.levels.draw(self._began + start)
            start += 1
        for epoch in itertools.count(start // size):
            yield from self._draws(epoch)[max(0, start - epoch * size) :]

    def _draws(self, epoch: int) -> list[tuple[int, int]]:
        """The epoch's prompts in order: for the how-manieth time each is asked, and its place."""
        if self._mixture is not None:
            return self._mixture.epoch(epoch)
        return [(epoch, place) for place in self._epoch(epoch)]

    def _epoch(self, epoch: int) -> list[int]:
        size, seed = len(self._prompts.prompts), self._order.seed
        if self._curriculum is not None:
            return self._checked(self._curriculum(self._prompts.prompts, epoch, seed))
        if not self._order.shuffle:
            return list(range(size))
        order: list[int] = np.random.default_rng((seed, epoch)).permutation(size).tolist()
        return order

    def _checked(self, order: Sequence[int]) -> list[int]:
        """Check that a curriculum has each prompt once: the ledger counts them."""
        if sorted(order) != list(range(len(self._prompts.prompts))):
            raise UserError(
                f"data.curriculum {self._order.curriculum}: order() gave {len(order)} places, want each of"
                f" 0..{len(self._prompts.prompts) - 1} once"
            )
        return list(order)

    def _cursor(self, position: int) -> str:
        levels = {"levels": self._order.levels.state()} if self._order.levels else {}
        began = {"began": self._began, "first_turn": self._first_turn} if self._first_turn else {}
        return json.dumps({"position": position, **began, **levels, **self._identity()})

    def _identity(self) -> dict[str, object]:
        order = self._order
        seed = order.seed if order.shuffle or order.curriculum or order.levels else None
        identity: dict[str, object] = {"data": self._prompts.fingerprint, "seed": seed}
        if order.weights:
            identity["weights"] = dict(order.weights)
        if curriculum := "held-out score" if order.levels else order.curriculum:
            identity["curriculum"] = curriculum
        return identity

    def _start(self, state: RunState) -> int:
        if not state.cursor:
            return 0
        stored = json.loads(state.cursor)
        position: int = stored.pop("position")
        self._began = stored.pop("began", 0)
        self._first_turn = stored.pop("first_turn", 0)
        levels = stored.pop("levels", None)
        identity = self._identity()
        other = [k for k in (*identity, *stored) if stored.get(k) != identity.get(k)]
        if other:
            was = f"run {self._run} was fed {other[0]} {stored.get(other[0])}, now it is {identity.get(other[0])}"
            if not self._accept_changes:
                raise UserError(
                    f"{was}: a resumed run needs the same prompts in the same order; use another run.name for other"
                    " data, or --accept-changes"
                )
            log.warning("%s: it continues from their beginning", was)
            # No prompt was asked more often than prompts were, those of the chunk that was being admitted included.
            self._first_turn += position - self._began + CHUNK
            self._began = position
        elif self._order.levels:
            self._order.levels.restore(levels)
        return position
