"""Keeps what running responses have so far in the queue, so that whoever holds a row next goes on from there.

    program ◀── deltas ── Recorder ◀── engine          lease with a prefix ─▶ Recorder: the prefix first, then the
                             │ record                                         engine from prompt + prefix
                             ▼
                        Entry.unsent ──(N tokens, T ms, drain)──▶ one call in flight ──▶ Queue.append

consumes: deltas of running responses. waits for: a row with enough of them, the timer, the answer to the last append.
unblocked by: `record`, the timer, the queue; at a drain by FLUSH_S at the latest. produces: appends, one for all rows
of a run. The way of a token from engine to program waits for none of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from meshrl.contract.errors import (
    ConflictError,
    CorruptError,
    FencedError,
    MeshError,
    UserError,
)
from meshrl.contract.generation_checkpoint import progress_frame, recorded_progress
from meshrl.contract.ports import Queue
from meshrl.contract.types import (
    ROLLOUT_STAGE,
    GenerateDelta,
    LeasedRow,
    ProgressGroup,
    Uid,
    Version,
)
from meshrl.rollout.config import JournalIntervals
from meshrl.rollout.versions import UNSERVED

log = logging.getLogger(__name__)

FLUSH_S = 5.0
"""A worker that ends waits so long for the queue to take what it has: tokens can be sampled again."""


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """One running row. Tokens go from `unsent` over `sending` to the queue, which has `kept` of them."""

    row: LeasedRow
    kept: int
    sending: list[GenerateDelta] = field(default_factory=list)
    """The append in flight, or the one that failed: repeated as it was, since it may have arrived."""
    unsent: list[GenerateDelta] = field(default_factory=list)
    fresh: int = 0
    """Tokens since the last attempt."""

    def load(self) -> bool:
        """Make the next append ready; False for nothing to append."""
        self.fresh = 0
        if not self.sending:
            self.sending, self.unsent = self.unsent, []
        return bool(self.sending)

    def sent(self) -> None:
        """The queue has it."""
        self.kept += sum(len(delta.tokens) for delta in self.sending)
        self.sending = []


@dataclass(slots=True)
class GenerationCheckpointStats:
    """Since the start."""

    appends: int = 0
    tokens: int = 0
    """That the queue took."""
    continued: int = 0
    """Tokens of earlier holders that rows went on from."""


class Journal:
    """The journal of one worker: an `Entry` per response that runs. Satisfies `contract.stage.Progress`."""

    def __init__(
        self,
        queue: Queue,
        intervals: JournalIntervals,
        *,
        max_staleness: float,
        lost: Callable[[set[Uid]], None],
    ) -> None:
        """`lost` is told of rows that somebody else holds by now."""
        self.stats = GenerationCheckpointStats()
        self._queue = queue
        self._intervals = intervals
        # An append begun at half of it is through, as a rule, before a row has the other half.
        self._enough = (intervals.tokens + 1) // 2
        self._max_staleness = max_staleness
        self._lost = lost
        self._entries: dict[Uid, Entry] = {}
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._one_call = asyncio.Lock()
        self._failing = False

    def prefix(self, row: LeasedRow, now: Version) -> list[GenerateDelta] | None:
        """What earlier holders left of a row, as an engine at `now` may go on with it; None: nothing that it may.

        A prefix so old that its row would leave as stale is not worth a token more.
        """
        if not row.prefix:
            return []
        try:
            deltas = recorded_progress(row.prefix)
        except CorruptError as error:
            log.warning("%s is sampled from its start: %s", row.uid, error)
            return None
        sampled = [delta.version.step for delta in deltas if delta.version != UNSERVED]
        oldest = min(sampled, default=now.step)
        if now.step - oldest > self._max_staleness:
            log.info("%s is sampled from its start: tokens of step %d are stale", row.uid, oldest)
            return None
        return deltas

    def begin(self, row: LeasedRow, kept: int) -> None:
        """A row runs; the queue has the first `kept` tokens that follow its prompt."""
        self._entries[row.uid] = Entry(row=row, kept=kept)
        self.stats.continued += kept

    def record(self, uid: Uid, delta: GenerateDelta) -> None:
        """More of a row that runs; for one that does not, nothing. A turn that ends may be the last: no hurry."""
        entry = self._entries.get(uid)
        if entry is None or not len(delta.tokens):
            return
        entry.unsent.append(delta)
        entry.fresh += len(delta.tokens)
        if self._enough and entry.fresh >= self._enough and not delta.finish_reason:
            self._due.set()
        self._set_timer()

    def keeps(self, uid: Uid) -> bool:
        """True while the row runs: whoever holds it next can go on with it."""
        return uid in self._entries

    def drop(self, uids: Iterable[Uid]) -> None:
        """Nothing more of these rows is to be kept."""
        for uid in uids:
            self._entries.pop(uid, None)

    async def run(self) -> None:
        """Append whenever something is due, until cancelled."""
        while True:
            await self._due.wait()
            await self._append()

    async def flush(self) -> None:
        """Append everything, and forget it. Never raises, and ends within FLUSH_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                for _ in range(2):  # once more for what came while a failed one had to be repeated
                    if self._left():
                        await self._append()
        if left := self._left():
            log.warning("the last tokens of %d responses were not kept", left)
        self._entries.clear()
        self._stop_timer()

    def _left(self) -> int:
        """Responses with tokens that the queue does not have."""
        return sum(bool(entry.sending or entry.unsent) for entry in self._entries.values())

    async def _append(self) -> None:
        async with self._one_call:
            self._due.clear()
            self._stop_timer()
            runs: dict[str, list[Entry]] = defaultdict(list)
            for uid, entry in self._entries.items():
                if entry.load():
                    runs[uid.run].append(entry)
            for run, entries in runs.items():
                await self._append_rows(run, entries)

    async def _append_rows(self, run: str, entries: Sequence[Entry]) -> None:
        """One call for all; a row that the queue refuses leaves, and the others are sent again."""
        while entries := [e for e in entries if self._entries.get(e.row.uid) is e]:
            try:
                await self._queue.append(run, ROLLOUT_STAGE.name, _groups(entries))
            except MeshError as error:
                if not self._refused(error, entries):
                    self._put_off(error)
                    return
            else:
                self.stats.appends += 1
                for entry in entries:
                    before = entry.kept
                    entry.sent()
                    self.stats.tokens += entry.kept - before
                self._failing = False
                return

    def _refused(self, error: MeshError, entries: Sequence[Entry]) -> bool:
        """Let go of the one row that the queue will not take; False where it is not about one of `entries`."""
        if not isinstance(error, FencedError | ConflictError | UserError):
            return False
        named = str(error.details.get("uid", ""))
        entry = next((entry for entry in entries if str(entry.row.uid) == named), None)
        if entry is None:
            return False
        uid = entry.row.uid
        if self._entries.get(uid) is not entry:
            return True  # its response has ended, and been written, while this was on its way
        self.drop([uid])
        if isinstance(error, FencedError):
            self._lost({uid})
        else:
            log.warning("%s: nothing more is kept of it while it runs: %s", uid, error)
        return True

    def _put_off(self, error: MeshError) -> None:
        """Try again with what comes next; said once until it works again."""
        if not self._failing:
            log.warning("running responses are not kept for now: %s", error)
        self._failing = True
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is None and self._intervals.ms:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._intervals.ms / 1000, self._due.set)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _groups(entries: Sequence[Entry]) -> list[ProgressGroup]:
    """The rows by group and token, a frame each."""
    bins: dict[tuple[str, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        bins[entry.row.uid.task, entry.row.token].append(entry)
    return [
        ProgressGroup(
            task=task,
            indices=tuple(entry.row.uid.index for entry in members),
            attempts=tuple(entry.row.uid.attempt for entry in members),
            token=token,
            starts=tuple(entry.kept for entry in members),
            frame=progress_frame([entry.sending for entry in members]),
        )
        for (task, token), members in bins.items()
    ]
