"""What comes next, for every rank: rank 0 waits for it and reads it out to the others."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Mapping
from enum import Enum
from typing import Any, TypeAlias

from meshrl.contract.errors import (
    EndOfDataError,
    UnavailableError,
    UserError,
    WaitTimeoutError,
)
from meshrl.contract.ports import Queue
from meshrl.contract.types import Batch, Json
from meshrl.trainer.compute import Compute
from meshrl.trainer.distributed import World
from meshrl.trainer.dynamic_sampling import DynamicSampling
from meshrl.trainer.learner.experience import batch_from_json, batch_to_json
from meshrl.trainer.reward_version_guard import RewardVersionGuard
from meshrl.trainer.settings import TrainerSettings
from meshrl.trainer.status import Board

log = logging.getLogger(__name__)


class Word(Enum):
    """What a rank is told when it is not given a batch."""

    SAVE = "save"
    """Somebody asked for a checkpoint."""
    END = "end"
    """No batch will come: the data have ended."""
    DRAIN = "drain"
    """No batch is wanted: this process is to end, the run goes on another time."""


Next: TypeAlias = Batch | Word


class BatchSource:
    """Gives each rank the same next thing to do.

    consumes: manifests, requests to drain or save. waits for: complete groups; other ranks for rank 0's words, which
    come at least every `take_wait_s`. unblocked by: the queue, `drain`, `ask_to_save`.
    """

    def __init__(
        self,
        setting: TrainerSettings,
        queue: Queue,
        world: World,
        compute: Compute,
        board: Board,
        rewards: RewardVersionGuard | None = None,
    ) -> None:
        self._setting = setting
        self._queue = queue
        self._rewards = rewards
        self._world = world
        self._compute = compute
        self._board = board
        self._draining = False
        self._asked: asyncio.Future[int] | None = None
        self._interrupt = asyncio.Event()
        self._sieve = DynamicSampling(
            queue,
            setting.run,
            setting.filter_groups,
            groups=setting.batch_groups,
            extra_rows=setting.extra_rows,
        )
        self._dead_before: int | None = None
        """Dead-lettered rows when the trainer first waited in vain for the batch that it wants; None: it did not."""

    def drain(self) -> None:
        """Give no further batch; a wait under way ends."""
        self._draining = True
        self._interrupt.set()

    def ask_to_save(self) -> asyncio.Future[int]:
        """Have a checkpoint saved next; the future is its step. Asking again before it is saved joins."""
        if self._asked is None:
            self._asked = asyncio.get_running_loop().create_future()
        self._interrupt.set()
        return self._asked

    def saved(self, step: int) -> None:
        """A checkpoint of `step` is durable."""
        asked, self._asked = self._asked, None
        if asked and not asked.done():
            asked.set_result(step)

    def close(self) -> None:
        """Answer whoever still waits for a checkpoint."""
        if self._asked and not self._asked.done():
            self._asked.set_exception(UnavailableError("training ended before the checkpoint"))
            self._asked.exception()  # the asker may be gone: nobody else reads it

    async def next(self, epoch: int, step: int) -> Next:
        """The batch of optimizer step `step`, or what to do instead.

        Raises:
            FencedError: another trainer took the run over.
        """
        if not self._world.is_main:
            return await self._listen()
        if self._setting.total_steps is not None and step >= self._setting.total_steps:
            got: Next = Word.END
        else:
            got = await self._take(epoch, step)
        if isinstance(got, Batch):
            rewards = self._rewards.to_json() if self._rewards else {}
            await self._say({"word": "batch", "batch": batch_to_json(got), "rewards": rewards})
        else:
            await self._say({"word": got.value})
        return got

    async def settle(self, batch: Batch, epoch: int) -> None:
        """The batch that `next` gave went into its step. On rank 0."""
        await self._sieve.settle(batch, epoch)

    @property
    def facts(self) -> dict[str, Json]:
        """How the last batch was put together."""
        return self._sieve.facts

    async def keep_peers(self, work: Awaitable[None]) -> None:
        """Await rank 0's `work` while the other ranks listen for what is next; they hear that it goes on."""
        if self._world.size == 1 or not self._world.is_main:
            await work
            return
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=self._setting.trainer.take_wait_s))[0]:
                await self._say({"word": "waiting"})
            task.result()
        finally:
            task.cancel()

    async def _listen(self) -> Next:
        while True:
            heard = json.loads(await self._compute.run(self._world.broadcast))
            if heard["word"] == "batch":
                if self._rewards:
                    self._rewards.hear(heard["rewards"])
                return batch_from_json(heard["batch"])
            if heard["word"] != "waiting":
                return Word(heard["word"])

    async def _take(self, epoch: int, step: int) -> Next:
        """Wait for a batch in bounded waits, saying after each what blocks."""
        run, sieve = self._setting.run, self._sieve
        sieve.begin(epoch, step)
        while True:
            self._interrupt.clear()
            if self._draining:
                log.info("run %s: draining before step %d", run, step)
                return Word.DRAIN
            if self._asked:
                return Word.SAVE
            taking = asyncio.ensure_future(
                self._queue.take(
                    run,
                    epoch=epoch,
                    step=step,
                    groups=sieve.wanted,
                    batch_id=sieve.batch_id,
                    wait_s=self._setting.trainer.take_wait_s,
                )
            )
            try:
                if await self._done_before_interrupt(taking):
                    taken = taking.result()
                    self._dead_before = None
                    if await sieve.add(taken):
                        return sieve.batch
            except WaitTimeoutError:
                await self._refuse_hopeless()
                await self._tell_what_blocks()
                await self._say({"word": "waiting"})
            except EndOfDataError as error:
                if sieve.batch.rows:
                    return sieve.batch
                log.info("run %s: the data end before step %d: %s", run, step, error)
                return Word.END

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

    async def _refuse_hopeless(self) -> None:
        """End a wait that rows are dying in: a batch's worth given up, and not one batch come together.

        Raises:
            UserError: with the reason most rows died of.
        """
        run, rows = self._setting.run, self._setting.batch_rows
        dead = sum((await self._queue.ledger(run)).dead_lettered.values())
        if self._dead_before is None:
            self._dead_before = dead
            return
        if dead - self._dead_before < rows:
            return
        letters = await self._queue.dead_letters(run)
        reasons = Counter(f"{letter.stage}: {letter.reason}" for letter in letters[-rows:])
        reason, count = reasons.most_common(1)[0]
        raise UserError(
            f"run {run}: {dead - self._dead_before} rows were given up while the trainer waited for one batch of"
            f" {rows}; {count} of the last {min(rows, len(letters))} died of {reason!r}"
            f" (all: meshrl dead-letters; try them again: meshrl dead-letters replay)"
        )

    async def _tell_what_blocks(self) -> None:
        run = self._setting.run
        waiting = await self._queue.why_waiting(run)
        self._board.blocked(waiting)
        for one in waiting[:3]:
            owners = ", ".join(one.owners) or "nobody"
            log.info(
                "run %s waits: %s, %s for %.0f s (%s)", run, one.who, one.what, one.since_s, owners
            )
        if not waiting:
            log.info("run %s waits for a batch; the queue names nothing that blocks", run)

    async def _say(self, words: Mapping[str, Json]) -> None:
        await self._compute.run(lambda: self._world.broadcast(json.dumps(words).encode()))
