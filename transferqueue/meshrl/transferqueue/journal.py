"""Group commit: transitions are staged as they happen and acknowledged once the store has them.

    transition (synchronous) ──touch / put / delete──▶ staged ──cut──▶ in flight ──apply──▶ durable
                                                         ▲                                   │
                       callers wait in `flush` ──────────┴──────── woken together ◀──────────┘

One commit is in flight at a time; whatever is staged meanwhile makes up the next one, so many concurrent transitions
share one fsync, in order. A record that was touched ten times is encoded once.

consumes: transitions. waits for: the store. unblocked by: `apply`'s return. produces: acknowledgements.

A commit that fails is a crash in small: nothing that was not acknowledged survives. Everything staged is refused and
`recover` puts the state of the last commit back into RAM; callers repeat, as every write is idempotent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from meshrl.contract.errors import InfraError, MeshError, UnavailableError
from meshrl.transferqueue.store import Operation, Store, Table

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


class Journal:
    """Owned by the queue; `run` is its one task."""

    def __init__(self, store: Store, recover: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._recover = recover
        self._staged = _Commit()
        self._in_flight: _Commit | None = None
        self._work = asyncio.Event()
        self._closing = False
        self._failure: MeshError | None = None

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
            CapacityError: the disk is full; nothing that was staged happened.
            UnavailableError: the queue is closing.
        """
        if self._failure is not None:
            raise _fresh(self._failure)
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
                await self._commit()

    def close(self) -> None:
        """Let `run` return once everything is durable."""
        self._closing = True
        self._work.set()

    async def _commit(self) -> None:
        commit, self._staged = self._staged, _Commit()
        self._in_flight = commit
        try:
            await self._store.apply(commit.operations())
        except MeshError as error:
            await self._fail(commit, error)
        except Exception as error:
            await self._fail(commit, InfraError(f"queue store: {type(error).__name__}: {error}"))
        else:
            commit.done.set_result(None)
        finally:
            self._in_flight = None

    async def _fail(self, commit: _Commit, error: MeshError) -> None:
        log.error("a commit failed, the queue goes back to the last one: %s", error)
        self._failure = error
        commit.done.set_exception(error)
        while True:
            try:
                await self._recover()
            except MeshError as problem:
                self._failure = problem
                if self._closing:
                    problem = UnavailableError(f"the queue closed on a broken store: {problem}")
                    self._refuse_staged(problem)
                    return
                log.error("queue store cannot be read back: %s", problem)
                await asyncio.sleep(RECOVERY_PAUSE_S)
            else:
                return

    def restarted(self) -> None:
        """RAM is back at the last commit: forget what was staged on the state that is gone."""
        if self._failure is not None:
            self._refuse_staged(self._failure)
            self._failure = None

    def _refuse_staged(self, error: MeshError) -> None:
        staged, self._staged = self._staged, _Commit()
        if not staged.done.done():
            staged.done.set_exception(error)


def _fresh(error: MeshError) -> MeshError:
    """A copy: one exception raised in many tasks would collect all their tracebacks."""
    return type(error)(error.message, **dict(error.details))
