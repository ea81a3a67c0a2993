"""The store port: two tables of bytes that change atomically; and the check that a store has space for more."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from meshrl.contract.errors import CapacityError, UnavailableError
from meshrl.contract.types import Waiting

FORMAT: Final = 4
"""The version of the stored format. Raise it with any change of keys, records or frames."""


class OwnerLostError(UnavailableError):
    """Another queue owns the store now; this one cannot serve any more."""


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

    The queue groups transitions into commits (see commit_log.py), so a store can be simple.
    """

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
    """Asked before every call that brings bytes; remembers for `why_waiting` which callers were refused."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._refused: dict[tuple[str, str], tuple[float, int]] = {}
        """By run and caller: since when, and how many bytes."""

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
