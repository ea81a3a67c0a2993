"""The store port: two tables of bytes that change atomically; the check for space; frames in RAM; the commit log.

    transition (synchronous) ──touch / put / delete──▶ staged ──cut──▶ in flight ──apply──▶ durable
                                                         ▲                                   │
                       callers wait in `flush` ──────────┴──────── all resume ◀──────────────┘

One commit is in flight at a time. What is staged meanwhile makes up the next one, so that many concurrent transitions
share one fsync, in order. A record that was touched ten times is encoded once.

consumes: transitions. waits for: the store. unblocked by: `apply` that returns. produces: acknowledgements.

A failed commit is like a crash: nothing that was not acknowledged survives. All that is staged is refused, and
`recover` reads the state of the last commit back into RAM. Callers repeat their calls, as every write is idempotent.
When another queue has taken the store over, the commit log ends: it refuses everything, and `ended` says why.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

import orjson

from meshrl.contract.errors import (
    BrokenDiskError,
    CapacityError,
    InfraError,
    MeshError,
    UnavailableError,
)
from meshrl.contract.frames import strip_checksum, with_checksum
from meshrl.contract.types import Json, Waiting

log = logging.getLogger(__name__)

FORMAT: Final = 4
"""The version of the stored format. Raise it with any change of keys, records or frames."""


FRAME: Final = b"c"
"""How the keys of frames begin."""


class OwnerLostError(UnavailableError):
    """Another queue owns the store now; this one cannot serve any more."""


class RowsEvictedError(UnavailableError):
    """The store's server has dropped records by itself."""


LOST: Final = (OwnerLostError, BrokenDiskError, RowsEvictedError)
"""Errors of a store after which this queue ends."""


class Table(StrEnum):
    """The two tables of a store."""

    META = "meta"
    """Small records, read as a whole when the queue opens: runs, groups, batches, dead letters."""
    PAYLOAD = "payload"
    """Columns, tasks and manifests, read by key when a call needs them."""


class Operation(NamedTuple):
    """Put `value` under `key`, or delete the key when `value` is None."""

    table: Table
    key: bytes
    value: bytes | None


class Store(Protocol):
    """Keeps bytes for the one queue that owns it, which never has two calls of `apply` in flight.

    The queue groups transitions into commits (see CommitLog), so a store can be simple.
    """

    @property
    def name(self) -> str:
        """Name of the store and its place, for messages."""
        ...

    async def load(self) -> Sequence[tuple[bytes, bytes]]:
        """Open (or open again, after a failed `apply`) and return every record of META, in key order.

        Raises:
            UserError: stored by another format, or owned by another process.
            CorruptError: the bytes on disk are not a store.
        """
        ...

    async def apply(self, operations: Sequence[Operation]) -> None:
        """Do all of `operations` or none; on return they are durable in this store's sense. Each key comes once.

        Raises:
            CapacityError: they do not fit; nothing was done.
            InfraError: the store failed; `load` shows what was done.
            OwnerLostError: the store has another owner; nothing was done, and no later call will succeed.
        """
        ...

    async def read(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """The PAYLOAD values of `keys`, in order; None where there is none."""
        ...

    def check_room(self, nbytes: int) -> None:
        """Raise CapacityError if `nbytes` more would leave no space for the records of leaving rows."""
        ...

    def size_bytes(self) -> int:
        """Bytes that the store takes on disk or in memory."""
        ...

    def export(self) -> AsyncGenerator[Sequence[Operation], None]:
        """Every record as of one commit, META before PAYLOAD, in pieces; close the generator if you stop early.

        Raises:
            InfraError: it cannot be read.
        """
        ...

    async def close(self) -> None:
        """Release files and connections; idempotent."""
        ...


class SpaceCheck:
    """The check before every call that brings bytes; remembers for `why_waiting` which callers were refused."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._refused: dict[tuple[str, str], tuple[float, int]] = {}
        """Refused calls by run and caller: time of the first one, and bytes of the last one."""

    def check(self, run: str, who: str, nbytes: int) -> None:
        """Refuse `nbytes` that would leave no space for the records of leaving rows. Raises CapacityError."""
        try:
            self._store.check_room(nbytes)
        except CapacityError:
            since, _ = self._refused.get((run, who), (self._clock(), 0))
            self._refused[run, who] = (since, nbytes)
            raise
        self._refused.pop((run, who), None)

    def waiting(self, run: str) -> Iterator[Waiting]:
        """One entry per caller that was refused and would be again; one for everybody if not even a byte fits."""
        now = self._clock()
        named = False
        for (of_run, who), (since, nbytes) in list(self._refused.items()):
            if of_run == run and (why := self._lacks(nbytes)):
                named = True
                yield Waiting(who=who, what=f"space in the store: {why}", since_s=now - since)
        if not named and (why := self._lacks(1)):
            yield Waiting(who="everybody", what=f"space in the store: {why}", since_s=0.0)

    def _lacks(self, nbytes: int) -> str:
        try:
            self._store.check_room(nbytes)
        except CapacityError as error:
            return error.message
        return ""


CACHE_BYTES: Final = 512 << 20
"""Most bytes of frames that stay in RAM, unless set otherwise."""


class RecentFrames:
    """The frames that the store took last, in RAM as well: most are read again within seconds of their write.

    A frame in RAM is the very object that was checked when it was written, so it is neither read nor checked again.
    When there is no more room, new frames are only in the store until older ones are deleted: the older ones are read
    first. Belongs to the event loop of its queue.
    """

    def __init__(self, limit: int) -> None:
        """Keep at most `limit` bytes."""
        self._limit = limit
        self._frames: dict[bytes, bytes] = {}
        self._nbytes = 0

    def recall(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The frames of `keys` that are in RAM."""
        frames = self._frames
        return {key: frames[key] for key in keys if key in frames}

    def committed(self, operations: Sequence[Operation]) -> None:
        """Note that the store has applied `operations`."""
        for table, key, value in operations:
            if table is not Table.PAYLOAD or not key.startswith(FRAME):
                continue
            self._nbytes -= len(self._frames.pop(key, b""))
            if value is not None and self._nbytes + len(value) <= self._limit:
                self._frames[key] = value
                self._nbytes += len(value)

    def forget(self) -> None:
        """Drop all frames, as after a commit that failed: they are read from the store again."""
        self._frames.clear()
        self._nbytes = 0


BOUNDS_S: Final = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the buckets; one more bucket holds longer durations."""


class Durations:
    """Counts durations by bucket."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a duration of `seconds`, `times` times."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += times
        self.total_s += seconds * times

    def cumulative(self) -> list[tuple[float, int]]:
        """The number of durations up to each bound, and up to infinity."""
        total = 0
        counts: list[tuple[float, int]] = []
        for bound, count in zip((*BOUNDS_S, float("inf")), self.counts, strict=True):
            total += count
            counts.append((bound, total))
        return counts


def to_json(value: Json) -> bytes:
    """JSON; also takes integers beyond 64 bits, and text that UTF-8 cannot encode (reasons may hold some)."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, default=lambda part: json.loads(orjson.dumps(part))).encode()


def encode_record(value: Json) -> bytes:
    """The record of a JSON value, with its checksum."""
    return with_checksum(to_json(value))


def decode_record(value: bytes, what: str) -> Json:
    """The inverse of `encode_record`. Raises CorruptError."""
    body = strip_checksum(value, what)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return json.loads(bytes(body))


SLOW_S = 2.0
"""Seconds after which a commit is logged as slow."""
RECOVERY_PAUSE_S = 1.0
"""The pause between two attempts to read back a store that cannot be read."""


class Record(Protocol):
    """An object in RAM that has a record in META."""

    @property
    def key(self) -> bytes:
        """The key of the record."""
        ...

    def encode(self) -> bytes:
        """The record as of now, with its checksum."""
        ...


class _Commit:
    """The changes of one transaction; of two changes of one key, the last one counts."""

    def __init__(self) -> None:
        self.changes: dict[tuple[Table, bytes], Record | bytes | None] = {}
        """Changes by table and key: an object whose record is stored, a value, or None for a deletion."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Nobody waits for the commit of an expired lease: its exception must not be reported as unretrieved.
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())


class CommitLog:
    """The commit log of one queue; `run` is its one task."""

    def __init__(
        self,
        store: Store,
        recover: Callable[[], Awaitable[None]],
        recovery_pause_s: float = RECOVERY_PAUSE_S,
        *,
        on_committed: Callable[[Sequence[Operation]], None] = lambda operations: None,
    ) -> None:
        """A store that cannot be read back is tried again every `recovery_pause_s`.

        `on_committed` is called for each durable commit.
        """
        self._recovery_pause_s = recovery_pause_s
        self._store = store
        self._recover = recover
        self._staged = _Commit()
        self._in_flight: _Commit | None = None
        self._work = asyncio.Event()
        self._closing = False
        self._refusal: MeshError | None = None
        """Why the last failed commit failed."""
        self._broken: MeshError | None = None
        """Set while the store cannot be read back."""
        self._began_at = 0.0
        """When the commit in flight began, by the event loop's clock."""
        self.ended: asyncio.Future[UnavailableError] = asyncio.get_running_loop().create_future()
        """Done when the store is lost to this queue."""
        self.commit_s = Durations()
        """Durations from the start of a commit to its acknowledgement."""
        self._on_committed = on_committed

    def touch(self, record: Record) -> None:
        """Stage the record of `record`, encoded when the commit starts."""
        self._staged.changes[Table.META, record.key] = record
        self._work.set()

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        """Stage `value` under `key`."""
        self._staged.changes[table, key] = value
        self._work.set()

    def delete(self, table: Table, key: bytes) -> None:
        """Stage the deletion of `key`."""
        self._staged.changes[table, key] = None
        self._work.set()

    async def flush(self) -> None:
        """Return when everything that was staged until now is durable.

        Raises:
            CapacityError: the disk is full; nothing that was staged happened.
            InfraError: the store failed; nothing that was staged happened.
        """
        if self._broken is not None:
            raise _fresh(self._broken)
        commit = self._staged if self._staged.changes else self._in_flight
        if commit is None:
            return
        try:
            await asyncio.shield(commit.done)
        except MeshError as error:
            raise _fresh(error) from error

    def waiting(self) -> Iterator[Waiting]:
        """The commit in flight, if the store takes long over it."""
        since_s = asyncio.get_running_loop().time() - self._began_at
        if self._in_flight is not None and since_s > SLOW_S:
            why = f": {self._broken.message}" if self._broken else ""
            what = f"{self._store.name} to store a commit{why}"
            yield Waiting(who="the queue", what=what, since_s=since_s)

    async def run(self) -> None:
        """Commit until `close`, including what is staged by then."""
        while self._staged.changes or not self._closing:
            await self._work.wait()
            self._work.clear()
            while self._staged.changes:
                if self.ended.done():
                    self._refuse_staged()
                else:
                    await self._commit()

    def close(self) -> None:
        """Let `run` return once everything is durable."""
        self._closing = True
        self._work.set()

    async def _commit(self) -> None:
        commit, self._staged = self._staged, _Commit()
        self._in_flight = commit
        self._began_at = asyncio.get_running_loop().time()
        start = time.perf_counter()
        try:
            operations = [
                Operation(
                    table,
                    key,
                    change if change is None or isinstance(change, bytes) else change.encode(),
                )
                for (table, key), change in commit.changes.items()
            ]
            await self._store.apply(operations)
        except Exception as error:
            await self._fail(commit, _as_mesh_error(error))
        else:
            self.commit_s.add(time.perf_counter() - start)
            self._on_committed(operations)
            commit.done.set_result(None)
        finally:
            self._in_flight = None

    async def _fail(self, commit: _Commit, error: MeshError) -> None:
        """Go back to the last commit, then raise in the callers: when they repeat their calls, the queue works."""
        log.error("a commit failed, the queue goes back to the last one: %s", error)
        self._refusal = error
        while not self._lost(commit, error):
            try:
                await self._recover()
            except Exception as failure:
                problem = _as_mesh_error(failure)
                log.error("queue store cannot be read back: %s", problem)
                self._broken = self._refusal = problem
                _refuse(commit, problem)
                self._refuse_staged()
                if self._lost(commit, problem) or self._closing:
                    return
                await asyncio.sleep(self._recovery_pause_s)
            else:
                self._broken = None
                _refuse(commit, error)
                return

    def _lost(self, commit: _Commit, error: MeshError) -> bool:
        """Whether `error` ends the queue; then everything is refused with it from now on."""
        if not isinstance(error, LOST):
            return False
        self._broken = self._refusal = error
        _refuse(commit, error)
        self._refuse_staged()
        self.ended.set_result(error)
        return True

    def restarted(self) -> None:
        """RAM is back at the last commit: refuse what was staged on the discarded state."""
        self._refuse_staged()

    def _refuse_staged(self) -> None:
        staged, self._staged = self._staged, _Commit()
        _refuse(staged, self._refusal or UnavailableError("the queue is not open yet"))


def _refuse(commit: _Commit, error: MeshError) -> None:
    if not commit.done.done():
        commit.done.set_exception(error)


def _as_mesh_error(error: Exception) -> MeshError:
    if isinstance(error, MeshError):
        return error
    log.exception("the queue's store failed with an unexpected error", exc_info=error)
    return InfraError(f"queue store: {type(error).__name__}: {error}")


def _fresh(error: MeshError) -> MeshError:
    """A copy, since one exception that is raised in many tasks would collect all their tracebacks."""
    return type(error)(error.message, **dict(error.details))
