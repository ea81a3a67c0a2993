"""Group commit: transitions are staged as they happen and acknowledged once the store has them.

    transition (synchronous) ──touch / put / delete──▶ staged ──cut──▶ in flight ──apply──▶ durable
                                                         ▲                                   │
                       callers wait in `flush` ──────────┴──────── woken together ◀──────────┘

One commit is in flight at a time; whatever is staged meanwhile makes up the next one, so many concurrent transitions
share one fsync, in order. A record that was touched ten times is encoded once.

consumes: transitions. waits for: the store. unblocked by: `apply`'s return. produces: acknowledgements.

A commit that fails is a crash in small: nothing that was not acknowledged survives. Everything staged is refused and
`recover` puts the state of the last commit back into RAM; callers repeat, as every write is idempotent. A store that
another queue owns by now ends the journal: everything is refused from then on, and `ended` says why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from meshrl.contract.errors import InfraError, MeshError, UnavailableError
from meshrl.transferqueue.model.durations import Durations
from meshrl.transferqueue.store import Operation, OwnerLostError, Store, Table

log = logging.getLogger(__name__)

RECOVERY_PAUSE_S = 1.0
"""Between two tries to read back a store that cannot even be read."""


class Record(Protocol):
    """Something in RAM with a record in META."""

    @property
    def key(self) -> bytes:
        """Where it is stored."""
        ...

    def encode(self) -> bytes:
        """As it is now, sealed."""
        ...


class _Commit:
    """What one transaction will hold; a key that changes twice keeps the last change."""

    def __init__(self) -> None:
        self.records: dict[bytes, Record] = {}
        self.values: dict[tuple[Table, bytes], bytes | None] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # A commit that nobody waits for (an expired lease) may fail without anybody asking.
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def empty(self) -> bool:
        return not self.records and not self.values

    def operations(self) -> list[Operation]:
        found = [Operation(table, key, value) for (table, key), value in self.values.items()]
        found += [Operation(Table.META, key, r.encode()) for key, r in self.records.items()]
        return found


class CommitLog:
    """Owned by the queue; `run` is its one task."""

    def __init__(self, store: Store, recover: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._recover = recover
        self._staged = _Commit()
        self._in_flight: _Commit | None = None
        self._work = asyncio.Event()
        self._closing = False
        self._refusal: MeshError | None = None
        """Why the last commit that failed did."""
        self._broken: MeshError | None = None
        """Set while the store cannot be read back."""
        self.ended: asyncio.Future[OwnerLostError] = asyncio.get_running_loop().create_future()
        """Done when another queue has taken the store over."""
        self.commit_s = Durations()
        """From the start of a commit to its acknowledgement."""

    def touch(self, record: Record) -> None:
        """`record` changed."""
        self._staged.values.pop((Table.META, record.key), None)
        self._staged.records[record.key] = record
        self._work.set()

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        """Store `value` under `key`."""
        self._staged.values[table, key] = value
        self._work.set()

    def delete(self, table: Table, key: bytes) -> None:
        """Forget `key`."""
        self._staged.records.pop(key, None)
        self._staged.values[table, key] = None
        self._work.set()

    async def flush(self) -> None:
        """Return when everything that was staged until now is durable.

        Raises:
            CapacityError: the disk is full; nothing of what was staged happened.
            InfraError: the store broke, likewise.
        """
        if self._broken is not None:
            raise _fresh(self._broken)
        commit = self._in_flight if self._staged.empty else self._staged
        if commit is None:
            return
        try:
            await asyncio.shield(commit.done)
        except MeshError as error:
            raise _fresh(error) from error

    async def run(self) -> None:
        """Commit until `close`; what is staged by then is committed first."""
        while not (self._closing and self._staged.empty):
            await self._work.wait()
            self._work.clear()
            while not self._staged.empty:
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
        start = time.perf_counter()
        try:
            await self._store.apply(commit.operations())
        except Exception as error:
            await self._fail(commit, _as_mesh_error(error))
        else:
            self.commit_s.add(time.perf_counter() - start)
            commit.done.set_result(None)
        finally:
            self._in_flight = None

    async def _fail(self, commit: _Commit, error: MeshError) -> None:
        """Go back to the last commit, then tell: whoever repeats the call finds a queue that works."""
        log.error("a commit failed, the queue goes back to the last one: %s", error)
        self._refusal = error
        while True:
            try:
                await self._recover()
            except Exception as caught:
                problem = _as_mesh_error(caught)
                log.error("queue store cannot be read back: %s", problem)
                self._broken = self._refusal = problem
                _refuse(commit, problem)
                self._refuse_staged()
                if isinstance(problem, OwnerLostError):
                    self.ended.set_result(problem)
                if self._closing or self.ended.done():
                    return
                await asyncio.sleep(RECOVERY_PAUSE_S)
            else:
                break
        self._broken = None
        _refuse(commit, error)

    def restarted(self) -> None:
        """RAM is back at the last commit: refuse what was staged on the state that is gone."""
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
    log.exception("the queue's store failed in a way it does not name", exc_info=error)
    return InfraError(f"queue store: {type(error).__name__}: {error}")


def _fresh(error: MeshError) -> MeshError:
    """A copy: one exception raised in many tasks would collect all their tracebacks."""
    return type(error)(error.message, **dict(error.details))
