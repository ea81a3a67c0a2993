"""Leases that a stage worker holds, for the code that renews them, and results that it still has to write.

    StageWorker ──add, drop──▶ HeldLeases ◀──by_run── renewing (the same loop), a client's lease renewer (a thread)
        ▲                                                  │
        └────────────────── lost ◀─────────────────────────┘

    call ──write──┐
    call ──write──┼── WriteBack: GATHER_S after the last write, or once no call works ──▶ one write of the queue
    call ──write──┘

WriteBack consumes: rows of columns. waits for: more results, then the queue. unblocked by: GATHER_S, a full write,
the end of the last working call; the queue. produces: one write for all that wait. Writing one row costs its sender,
the queue and the disk about as much as writing fifty; the first one after a pause goes at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NoReturn, Protocol, TypeAlias

from meshrl.contract.errors import FencedError, UserError
from meshrl.contract.types import LeasedRow, RowWrite, Uid

FIRST_TTL_S: Final = 5.0
"""The time to live before the first lease gives one."""
RENEWALS: Final = 3
"""Renewals in one time to live: two of them may get lost."""
GATHER_S = 0.1
"""Seconds between two writes while other calls work: short beside the seconds that sampling a row takes."""
MOST_ROWS = 256
"""Rows of one write, at most."""

Held: TypeAlias = Mapping[Uid, int]
"""Rows with the fencing tokens under which they are held."""
Refusal: TypeAlias = FencedError | UserError


class HeldLeases:
    """The rows that one worker holds for one stage. Its owner changes it; any thread may read it."""

    def __init__(self, stage: str, worker: str, lost: Callable[[Held], None]) -> None:
        """`lost` is called, in the owner's event loop, with rows that are held no longer."""
        self.stage = stage
        self.worker = worker
        self.lost = lost
        self.began: Callable[[], None] = lambda: None
        """Called when there is something to renew again; the renewing code sets it."""
        self.period_s = FIRST_TTL_S / RENEWALS
        """Seconds between two renewals."""
        self._rows: dict[Uid, int] = {}
        self._lock = threading.Lock()

    def add(self, rows: Iterable[LeasedRow], ttl_s: float) -> None:
        """Add leased rows."""
        with self._lock:
            began = not self._rows
            self.period_s = ttl_s / RENEWALS
            self._rows.update((row.uid, row.token) for row in rows)
        if began:
            self.began()

    def drop(self, rows: Iterable[LeasedRow]) -> None:
        """Drop rows that need no renewal any more; a row that was leased again since then stays."""
        with self._lock:
            for row in rows:
                if self._rows.get(row.uid) == row.token:
                    del self._rows[row.uid]

    def by_run(self) -> Mapping[str, Held]:
        """The held rows by run."""
        by_run: dict[str, dict[Uid, int]] = {}
        with self._lock:
            for uid, token in self._rows.items():
                by_run.setdefault(uid.run, {})[uid] = token
        return by_run

    def still(self, rows: Held) -> list[Uid]:
        """The `rows` still held under the same token: an answer may arrive after the next lease of a row."""
        with self._lock:
            return [uid for uid, token in rows.items() if self._rows.get(uid) == token]


class Renews(Protocol):
    """The method of the Queue port that `renewing` needs."""

    async def renew(self, run: str, stage: str, worker: str, uids: Sequence[Uid]) -> Sequence[Uid]:
        """Extend the lease; returns the uids that the worker holds no longer."""
        ...


async def renewing(queue: Renews, held_leases: HeldLeases) -> NoReturn:
    """Renew what is held until cancelled, in the owner's event loop."""
    began = asyncio.Event()
    held_leases.began = began.set
    while True:
        began.clear()
        if not held_leases.by_run():
            await began.wait()
        await asyncio.sleep(held_leases.period_s)
        for run, rows in held_leases.by_run().items():
            lost = await queue.renew(run, held_leases.stage, held_leases.worker, list(rows))
            if lost:
                held_leases.lost({uid: rows[uid] for uid in lost})


@dataclass(slots=True, eq=False)
class _PendingWrite:
    """The results of one call."""

    token_of: Mapping[Uid, int]
    writes: dict[Uid, RowWrite]
    refused: dict[Uid, Refusal] = field(default_factory=dict)
    error: Exception | None = None


class Writes(Protocol):
    """The method of the Queue port that `WriteBack` needs."""

    async def write_rows(
        self, run: str, stage: str, token_of: Mapping[Uid, int], rows: Sequence[RowWrite]
    ) -> None:
        """Add columns to leased rows, all or none, durable on return."""
        ...


class WriteBack:
    """The writes of one stage to one run; at most one is in flight."""

    def __init__(
        self,
        queue: Writes,
        run: str,
        stage: str,
        *,
        alone: Callable[[], bool],
        gather_s: float = GATHER_S,
        most_rows: int = MOST_ROWS,
    ) -> None:
        """`alone` says that no call works whose result might join the next write.

        While calls work, `gather_s` lie between two writes, or less once `most_rows` rows wait.
        """
        self._queue = queue
        self._run = run
        self._stage = stage
        self._alone = alone
        self._gather_s = gather_s
        self._most_rows = most_rows
        self._waiting: dict[_PendingWrite, int] = {}
        """Writes that wait, the longest first, each with its number of rows."""
        self._num_rows = 0
        """Rows of all that wait."""
        self._one_write = asyncio.Lock()
        self._go = asyncio.Event()
        self._next_at = 0.0

    async def write(
        self, token_of: Mapping[Uid, int], writes: Sequence[RowWrite]
    ) -> Mapping[Uid, Refusal]:
        """Return once each row is in the queue or was refused by it; the refused ones, with the error of each.

        The call that waits longest writes for all that wait. If it is cancelled meanwhile, the next one does.

        Raises:
            MeshError: the queue cannot be reached, or its disk is full and `queue` does not wait for space.
        """
        pending = _PendingWrite(token_of, {row.uid: row for row in writes})
        self._waiting[pending] = len(pending.writes)
        self._num_rows += len(pending.writes)
        if self._enough:
            self._go.set()
        try:
            async with self._one_write:
                while pending in self._waiting:  # no other call has written it
                    await self._write(await self._gather())
        finally:
            self._discard(pending)
        if pending.error is not None:
            raise pending.error
        return pending.refused

    @property
    def _enough(self) -> bool:
        """Whether a call is full, or no other row can join it."""
        return self._num_rows >= self._most_rows or self._alone()

    def _discard(self, pending: _PendingWrite) -> None:
        """Remove it from the waiting writes; idempotent, since a call may be cancelled while it is written."""
        self._num_rows -= self._waiting.pop(pending, 0)

    async def _gather(self) -> list[_PendingWrite]:
        """The pending writes that have waited longest, once waiting longer gains nothing."""
        if not self._enough:
            self._go.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._next_at):
                    await self._go.wait()
        self._next_at = asyncio.get_running_loop().time() + self._gather_s
        batch: list[_PendingWrite] = []
        gathered = 0
        for pending, num_rows in self._waiting.items():
            batch.append(pending)
            gathered += num_rows
            if gathered >= self._most_rows:
                break
        return batch

    async def _write(self, batch: Sequence[_PendingWrite]) -> None:
        try:
            if len(batch) == 1 or not await self._accepted(batch):
                for pending in batch:
                    await self._write_alone(pending)
        except Exception as error:
            for pending in batch:
                pending.error = error
        for pending in batch:
            self._discard(pending)

    async def _accepted(self, batch: Sequence[_PendingWrite]) -> bool:
        """Whether the queue takes all rows at once; it takes all or none."""
        try:
            await self._send(batch)
        except (FencedError, UserError):
            return False
        return True

    async def _write_alone(self, pending: _PendingWrite) -> None:
        """Write the rows of one call, without those that the queue refuses."""
        while pending.writes:
            try:
                await self._send([pending])
                return
            except (FencedError, UserError) as error:
                named = error.details.get("uid")
                uid = next((uid for uid in pending.writes if str(uid) == named), None)
                if (
                    uid is None and len(pending.writes) > 1
                ):  # it names none of them: which one is it?
                    await self._write_one_by_one(pending)
                    return
                refused = uid or next(iter(pending.writes))
                pending.refused[refused] = error
                del pending.writes[refused]

    async def _write_one_by_one(self, pending: _PendingWrite) -> None:
        for uid, row in pending.writes.items():
            one = _PendingWrite(pending.token_of, {uid: row})
            await self._write_alone(one)
            pending.refused.update(one.refused)

    async def _send(self, batch: Sequence[_PendingWrite]) -> None:
        token_of = {uid: pending.token_of[uid] for pending in batch for uid in pending.writes}
        rows = [row for pending in batch for row in pending.writes.values()]
        await self._queue.write_rows(self._run, self._stage, token_of, rows)
