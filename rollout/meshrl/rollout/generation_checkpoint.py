"""Saves the tokens of running responses in the queue, and lets the next worker of a row continue from there.

    program ◀── deltas ── ResumableGenerator ◀── engine     lease with a prefix ─▶ ResumableGenerator: the prefix
                             │ record                                   first, then the engine from prompt + prefix
                             ▼
                       RunningRow.unsent ──(N tokens, T ms, drain)──▶ one call in flight ──▶ Queue.append

consumes: deltas of running responses. waits for: a row with enough tokens, the timer, the answer to the last append.
unblocked by: `record`, the timer, the queue; at a drain by FLUSH_S at the latest. produces: appends, one for all rows
of a run. Tokens go from the engine to the program without waiting for any of this.

    the row      prompt │ sampled │ observed │ sampled ……
    checkpoint            ●●●●●●●   ○○○○○○○○   ●●●●●●●     ● with the version that sampled it, ○ with UNSERVED

The program of a row with a checkpoint runs again from its start: turns are answered from the checkpoint as far as it
reaches.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from typing_extensions import override

from meshrl.contract.errors import (
    ConflictError,
    CorruptError,
    FencedError,
    MeshError,
    UserError,
)
from meshrl.contract.frames import Flat, Frame, pack_flat
from meshrl.contract.ports import Queue
from meshrl.contract.stage_worker import Progress
from meshrl.contract.types import (
    ROLLOUT_STAGE,
    Columns,
    GenerateDelta,
    GenerateRequest,
    Int32,
    LeasedRow,
    RowBlock,
    Uid,
    Version,
)
from meshrl.rollout.config import CheckpointIntervals
from meshrl.rollout.ports import UNSERVED, Generator, Replaying
from meshrl.rollout.streams import closing

log = logging.getLogger(__name__)

FLUSH_S = 5.0
"""A worker that ends waits at most so long for the queue to accept its last tokens: they can be sampled again."""


@dataclass(slots=True, eq=False, kw_only=True)
class RunningRow:
    """One running row. Tokens go from `unsent` over `sending` to the queue, which has `saved` of them."""

    row: LeasedRow
    saved: int
    sending: list[GenerateDelta] = field(default_factory=list)
    """The append in flight, or the one that failed: it is repeated unchanged, since it may have arrived."""
    unsent: list[GenerateDelta] = field(default_factory=list)
    fresh: int = 0
    """Tokens since the last attempt."""

    def load(self) -> bool:
        """Prepare the next append; False: there is nothing to append."""
        self.fresh = 0
        if not self.sending:
            self.sending, self.unsent = self.unsent, []
        return bool(self.sending)

    def sent(self) -> None:
        """Note that the queue has accepted the append."""
        self.saved += sum(len(delta.tokens) for delta in self.sending)
        self.sending = []


@dataclass(slots=True)
class CheckpointStats:
    """Since the start."""

    appends: int = 0
    tokens: int = 0
    """Tokens that the queue accepted."""
    continued: int = 0
    """Tokens of earlier workers from which rows continued."""


class GenerationCheckpointer(Progress):
    """Saves the running rows of one worker."""

    def __init__(
        self,
        queue: Queue,
        intervals: CheckpointIntervals,
        *,
        max_staleness: float,
        lost: Callable[[set[Uid]], object],
    ) -> None:
        """`lost` is called with rows that another worker holds by now."""
        self.stats = CheckpointStats()
        self._queue = queue
        self._intervals = intervals
        # An append that begins at half of the interval usually ends before a row has the other half.
        self._append_at = (intervals.tokens + 1) // 2
        self._max_staleness = max_staleness
        self._lost = lost
        self._rows: dict[Uid, RunningRow] = {}
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._one_call = asyncio.Lock()
        self._failing = False

    def begin(self, row: LeasedRow, now: Version) -> list[GenerateDelta] | None:
        """Save the tokens of a row from here on; returns its saved prefix, for an engine at version `now`.

        None: the prefix must not be continued, and no tokens of the row are saved. A prefix so old that its row
        would be dropped as stale is not continued, nor is a row that this worker has leased again since then.
        """
        if (running := self._rows.get(row.uid)) is not None and running.row.token > row.token:
            return None
        try:
            deltas = recorded_progress(row.prefix) if row.prefix else []
        except CorruptError as error:
            log.warning("%s is sampled from the start: %s", row.uid, error)
            return None
        sampled = [delta.version.step for delta in deltas if delta.version != UNSERVED]
        oldest = min(sampled, default=now.step)
        if now.step - oldest > self._max_staleness:
            log.info("%s is sampled from the start: tokens of step %d are stale", row.uid, oldest)
            return None
        saved = sum(len(delta.tokens) for delta in deltas)
        self._rows[row.uid] = RunningRow(row=row, saved=saved)
        self.stats.continued += saved
        return deltas

    def record(self, row: LeasedRow, delta: GenerateDelta) -> None:
        """Record new tokens of a row that runs; other rows are ignored. The end of a turn is not urgent.

        An earlier lease of the row is ignored as well: its tokens are of another course.
        """
        entry = self._rows.get(row.uid)
        if entry is None or entry.row.token != row.token or not len(delta.tokens):
            return
        entry.unsent.append(delta)
        entry.fresh += len(delta.tokens)
        if self._append_at and entry.fresh >= self._append_at and not delta.finish_reason:
            self._due.set()
        self._set_timer()

    def keeps(self, uid: Uid) -> bool:
        """True while the row runs: the next worker can continue it."""
        return uid in self._rows

    def drop(self, uids: Iterable[Uid]) -> None:
        """Save no more tokens of these rows."""
        for uid in uids:
            self._rows.pop(uid, None)

    def end(self, row: LeasedRow) -> None:
        """Save no more tokens of this lease of a row."""
        entry = self._rows.get(row.uid)
        if entry is not None and entry.row.token == row.token:
            del self._rows[row.uid]

    async def run(self) -> None:
        """Append whenever tokens are due, until cancelled."""
        while True:
            await self._due.wait()
            await self._append()

    async def flush(self) -> None:
        """Append all recorded tokens, then drop all rows. Never raises, and ends within FLUSH_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                # A second time for tokens that came while a failed append was repeated.
                for _ in range(2):
                    if self.unsaved():
                        await self._append()
        if count := self.unsaved():
            log.warning("the last tokens of %d responses were not saved", count)
        self._rows.clear()
        self._stop_timer()

    def unsaved(self) -> int:
        """Responses with tokens that the queue does not have."""
        return sum(bool(row.sending or row.unsent) for row in self._rows.values())

    async def _append(self) -> None:
        async with self._one_call:
            self._due.clear()
            self._stop_timer()
            runs: dict[str, list[RunningRow]] = defaultdict(list)
            for uid, row in self._rows.items():
                if row.load():
                    runs[uid.run].append(row)
            for run, rows in runs.items():
                await self._append_rows(run, rows)

    async def _append_rows(self, run: str, rows: Sequence[RunningRow]) -> None:
        """Append all rows in one call; without a row that the queue refuses, the others are sent again."""
        while rows := [r for r in rows if self._rows.get(r.row.uid) is r]:
            try:
                await self._queue.append(run, ROLLOUT_STAGE.name, _blocks(rows))
            except MeshError as error:
                if not self._refused(error, rows):
                    self._put_off(error)
                    return
            else:
                self.stats.appends += 1
                for row in rows:
                    before = row.saved
                    row.sent()
                    self.stats.tokens += row.saved - before
                self._failing = False
                return

    def _refused(self, error: MeshError, rows: Sequence[RunningRow]) -> bool:
        """Drop the one row that the queue refuses; False where the error is not about one of `rows`."""
        if not isinstance(error, FencedError | ConflictError | UserError):
            return False
        named = str(error.details.get("uid", ""))
        refused = next((row for row in rows if str(row.row.uid) == named), None)
        if refused is None:
            return False
        uid = refused.row.uid
        if self._rows.get(uid) is not refused:
            return True  # its response has ended and been written while the append was in flight
        self.drop([uid])
        if isinstance(error, FencedError):
            self._lost({uid})
        else:
            log.warning("%s: no more of its tokens are saved while it runs: %s", uid, error)
        return True

    def _put_off(self, error: MeshError) -> None:
        """Try again with the next append; logged once until an append succeeds."""
        if not self._failing:
            log.warning("running responses are not saved for now: %s", error)
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


class ResumableGenerator(Replaying):
    """A generator for one row.

    Checkpoints are kept of rows that only grow: the id of the first request is the uid, and the prompt of each
    further one is everything requested and sampled before, plus an observation without pictures. Any other request is
    passed to the engine, and from there on no checkpoint is kept.
    """

    def __init__(
        self, engine: Generator, checkpointer: GenerationCheckpointer, row: LeasedRow
    ) -> None:
        self._engine = engine
        self._checkpointer = checkpointer
        self._row = row
        self._recording = True
        self._has_turns = False
        self._sampling = False
        self._parts: list[Int32] = [row.task.prompt_ids]
        self._past: deque[GenerateDelta] = deque()
        """The rest of the checkpoint that earlier workers left."""

    @property
    def version(self) -> Version:
        """The version that samples the next token."""
        return self._engine.version

    @property
    def _known(self) -> Int32:
        """All tokens of the row so far, int32[T]."""
        if len(self._parts) > 1:
            self._parts = [_joined(self._parts)]
        return self._parts[0]

    @override
    def observed(self, tokens: Int32) -> Int32:
        at_observation = self._recording and bool(self._past) and _observes(self._past[0])
        if at_observation and np.array_equal(tokens, self._known):
            return self._past[0].tokens
        return np.zeros(0, dtype=np.int32)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        """Sample one response; tokens of the checkpoint come first, with the versions that sampled them."""
        if not self._continues_row(request):
            self._stop_recording()
            async with closing(self._engine.generate(request)) as stream:
                async for delta in stream:
                    yield delta
            return
        before: list[GenerateDelta] = []  # the part of this turn that an earlier worker sampled
        while self._past and not _observes(self._past[0]):
            before.append(self._past.popleft())
        self._sampling = True
        try:
            self._parts = [request.prompt_ids, *(delta.tokens for delta in before)]
            for delta in before:
                yield delta
            async with closing(self._engine.generate(continuation(request, before))) as stream:
                async for delta in stream:
                    if self._past and len(delta.tokens):
                        # The turn ended earlier in the checkpoint: it is of another course of the row.
                        self._stop_recording()
                    self._parts.append(delta.tokens)
                    self._checkpointer.record(self._row, delta)
                    yield delta
        finally:
            self._sampling = False

    def _continues_row(self, request: GenerateRequest) -> bool:
        """Whether `request` is the next one of a growing row; if so, the observation before it is recorded."""
        has_turns, self._has_turns = self._has_turns, True
        if not self._recording or self._sampling or not (has_turns or self._begins(request)):
            return False
        seen, asked = request.media, self._row.task.media
        if [each.sha256 for each in seen] != [each.sha256 for each in asked]:
            # Tokens alone do not say which picture was observed: another worker asks the program again.
            return False
        known = self._known
        new = request.prompt_ids[len(known) :]
        if not np.array_equal(request.prompt_ids[: len(known)], known):
            return False
        if not len(new):
            # Two turns without an observation between them cannot be separated later.
            return not has_turns
        if self._past:
            past = self._past.popleft()
            return _observes(past) and np.array_equal(new, past.tokens)
        self._checkpointer.record(self._row, observation(new))
        return True

    def _begins(self, request: GenerateRequest) -> bool:
        """Whether checkpoints of the row can be kept, judged by its first request."""
        if request.request_id != str(self._row.uid):
            return False
        past = self._checkpointer.begin(self._row, self._engine.version)
        if past is None:
            return False
        self._past.extend(past)
        prompt = self._row.task.prompt_ids
        if not np.array_equal(request.prompt_ids[: len(prompt)], prompt):
            # A prompt that the program made itself is recorded as an observation.
            self._parts = [prompt[:0]]
        return True

    def _stop_recording(self) -> None:
        self._recording = False
        self._past.clear()
        self._checkpointer.end(self._row)


def observation(tokens: Int32) -> GenerateDelta:
    """Tokens that the policy did not sample, int32[k], as the checkpoint stores them."""
    zeros = np.zeros(len(tokens), dtype=np.float32)
    return GenerateDelta(tokens=tokens, logprobs=zeros, version=UNSERVED)


def continuation(request: GenerateRequest, prefix: Sequence[GenerateDelta]) -> GenerateRequest:
    """The request for the tokens after `prefix`."""
    tokens = [delta.tokens for delta in prefix]
    count = sum(map(len, tokens))
    if not count:
        return request
    left = max(0, request.sampling.max_tokens - count)
    return replace(
        request,
        prompt_ids=_joined([request.prompt_ids, *tokens]),
        sampling=replace(request.sampling, max_tokens=left),
        continued=count,
    )


def _blocks(rows: Sequence[RunningRow]) -> list[RowBlock]:
    """A block for the rows of each group and fencing token."""
    bins: dict[tuple[str, int], list[RunningRow]] = defaultdict(list)
    for row in rows:
        bins[row.row.uid.task, row.row.token].append(row)
    return [
        RowBlock(
            task=task,
            indices=tuple(row.row.uid.index for row in members),
            attempts=tuple(row.row.uid.attempt for row in members),
            token=token,
            starts=tuple(row.saved for row in members),
            frames=(Frame(progress_frame([row.sending for row in members])),),
        )
        for (task, token), members in bins.items()
    ]


def _observes(delta: GenerateDelta) -> bool:
    return delta.version == UNSERVED


def _joined(parts: Iterable[Int32]) -> Int32:
    return np.concatenate(list(parts)).astype(np.int32)


PROGRESS_COLUMNS: Final = {
    "tokens": (np.int32, 1),
    "rollout_logprobs": (np.float32, 1),
    "versions": (np.int32, 2),
}
"""dtype and rank of each: int32[n] tokens, float32[n] log-probs, int32[n, 2] epoch and step of who sampled each."""


def progress_frame(rows: Sequence[Sequence[GenerateDelta]]) -> bytes:
    """A frame with the deltas of each row; at least one token a row."""
    deltas = [delta for row in rows for delta in row]
    sizes = [len(delta.tokens) for delta in deltas]
    versions = np.array([(d.version.epoch, d.version.step) for d in deltas], dtype=np.int32)
    values = {
        "tokens": np.concatenate([delta.tokens for delta in deltas]),
        "rollout_logprobs": np.concatenate([delta.logprobs for delta in deltas]),
        "versions": np.repeat(versions, sizes, axis=0),
    }
    lengths = np.array([sum(len(delta.tokens) for delta in row) for row in rows], dtype=np.uint32)
    return pack_flat(len(rows), {name: Flat(each, lengths) for name, each in values.items()})


def recorded_progress(prefix: Columns) -> list[GenerateDelta]:
    """The stored progress of a row (`LeasedRow.prefix`) as deltas, one per run of tokens of one version.

    Raises:
        CorruptError: these are not the columns of a response.
    """
    found = {name: (array.dtype.type, array.ndim) for name, array in prefix.items()}
    sizes = {len(array) for array in prefix.values() if array.ndim}
    if found != PROGRESS_COLUMNS or len(sizes) != 1 or prefix["versions"].shape[1] != 2:
        names = ", ".join(f"{name} {array.dtype}{array.shape}" for name, array in prefix.items())
        raise CorruptError(f"not the checkpoint of a response: {names}")
    versions = prefix["versions"]
    borders = np.flatnonzero((versions[1:] != versions[:-1]).any(axis=1)) + 1
    starts = [0, *borders.tolist()]
    return [
        GenerateDelta(
            tokens=prefix["tokens"][start:end],
            logprobs=prefix["rollout_logprobs"][start:end],
            version=Version(*versions[start].tolist()),
        )
        for start, end in zip(starts, [*starts[1:], len(versions)], strict=True)
    ]
