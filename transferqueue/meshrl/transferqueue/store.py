"""What the queue asks of a place to keep things: two tables of bytes, changed atomically."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from meshrl.contract.errors import UnavailableError

FORMAT: Final = 4
"""Of everything stored. Raise it with any change of keys, records or frames."""


class OwnerLostError(UnavailableError):
    """Another queue owns the store now; this one can serve no more."""


class Table(StrEnum):
    """The two tables of a store."""

    META = "meta"
    """Small records, read as a whole when the queue opens: runs, groups, batches, dead letters."""
    PAYLOAD = "payload"
    """Columns, tasks and manifests, read by key when they are asked for."""


class Operation(NamedTuple):
    """Put `value` under `key`, or delete the key when `value` is None."""

    table: Table
    key: bytes
    value: bytes | None


class Store(Protocol):
    """Keeps bytes. One queue owns it; the queue never has two `apply` in flight.

    The queue groups transitions into commits (see commit_log.py), so a store stays as simple as this.
    """

    async def load(self) -> Sequence[tuple[bytes, bytes]]:
        """Open (or open anew, after a failed `apply`) and return every record of META, in key order.

        Raises:
            UserError: stored by another format, or owned by another process.
            CorruptError: the bytes on disk are not a store.
        """
        ...

    async def apply(self, operations: Sequence[Operation]) -> None:
        """Do all of `operations` or none, in this store's sense of durable on return; each key comes once.

        Raises:
            CapacityError: it does not fit; nothing of it was done.
            InfraError: the store broke; `load` says what was done.
            OwnerLostError: the store has another owner; nothing was done, and nothing ever will be.
        """
        ...

    async def read(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """The PAYLOAD values of `keys`, in order; None where there is none."""
        ...

    def check_room(self, nbytes: int) -> None:
        """Raise CapacityError when `nbytes` more would not leave room for rows to leave."""
        ...

    def size_bytes(self) -> int:
        """What the store takes where it keeps things: disk or memory, in bytes."""
        ...

    def export(self) -> AsyncGenerator[Sequence[Operation], None]:
        """Every record as of one commit, META before PAYLOAD, in pieces; close it when you stop early.

        Raises:
            InfraError: it cannot be read.
        """
        ...

    async def close(self) -> None:
        """Give everything back; idempotent."""
        ...
