"""Group commit: transitions are staged as they happen, and acknowledged when the store has made them durable.

    transition (synchronous) ──touch / put / delete──▶ staged ──cut──▶ in flight ──apply──▶ durable
                                                         ▲                                   │
                       callers wait in `flush` ──────────┴──────── all resume ◀──────────────┘

One commit is in flight at a time. What is staged meanwhile makes up the next one, so many concurrent transitions
share one fsync, in order. A record that was touched ten times is encoded once.

consumes: transitions. waits for: the store. unblocked by: `apply`'s return. produces: acknowledgements.

A failed commit is like a crash: nothing that was not acknowledged survives. All that is staged is refused, and
`recover` reads the state of the last commit back into RAM. Callers repeat their calls, as every write is idempotent.
When another queue has taken the store over, the commit log ends: it refuses everything, and `ended` says why.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import orjson

from meshrl.contract.errors import InfraError, MeshError, UnavailableError
from meshrl.contract.frames import strip_checksum, with_checksum
from meshrl.contract.types import Json
from meshrl.transferqueue.model.durations import Durations
from meshrl.transferqueue.store import Operation, OwnerLostError, Store, Table


def fragment(value: Json) -> orjson.Fragment:
    """A JSON value that is part of others, encoded once for all of them."""
    return orjson.Fragment(to_json(value))


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


log = logging.getLogger(__name__)

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
        self.records: dict[bytes, Record] = {}
        self.values: dict[tuple[Table, bytes], bytes | None] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Nobody waits for the commit of an expired lease: its exception must not be reported as unretrieved.
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def empty(self) -> bool:
        return not self.records and not self.values

    def operations(self) -> list[Operation]:
        operations = [Operation(table, key, value) for (table, key), value in self.values.items()]
        operations += [Operation(Table.META, key, r.encode()) for key, r in self.records.items()]
        return operations


class CommitLog:
    """The commit log of one queue; `run` is its one task."""

    def __init__(self, store: Store, recover: Callable[[], Awaitable[None]]) -> None:
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
        self.ended: asyncio.Future[OwnerLostError] = asyncio.get_running_loop().create_future()
        """Done when another queue has taken the store over."""
        self.commit_s = Durations()
        """From the start of a commit to its acknowledgement."""

    def touch(self, record: Record) -> None:
        """Stage the record of `record`, encoded when the commit starts."""
        self._staged.values.pop((Table.META, record.key), None)
        self._staged.records[record.key] = record
        self._work.set()

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        """Stage `value` under `key`."""
        self._staged.values[table, key] = value
        self._work.set()

    def delete(self, table: Table, key: bytes) -> None:
        """Stage the deletion of `key`."""
        self._staged.records.pop(key, None)
        self._staged.values[table, key] = None
        self._work.set()

    async def flush(self) -> None:
        """Return when everything that was staged until now is durable.

        Raises:
            CapacityError: the disk is full; nothing that was staged happened.
            InfraError: the store failed; nothing that was staged happened.
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
        """Commit until `close`, including what is staged by then."""
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
        """Go back to the last commit, then raise in the callers: when they repeat their calls, the queue works."""
        log.error("a commit failed, the queue goes back to the last one: %s", error)
        self._refusal = error
        while True:
            try:
                await self._recover()
            except Exception as failure:
                problem = _as_mesh_error(failure)
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
