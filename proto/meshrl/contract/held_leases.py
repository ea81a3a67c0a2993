"""The leases that a worker holds, readable by the code that renews them, be it in another thread.

StageWorker ──add, drop──▶ HeldLeases ◀──by_run── renewing (the same loop), a client's lease renewer (a thread)
    ▲                                                  │
    └────────────────── lost ◀─────────────────────────┘
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NoReturn, Protocol, TypeAlias

from meshrl.contract.types import LeasedRow, Uid

FIRST_TTL_S: Final = 5.0
"""The time to live before the first lease gives one."""
RENEWALS: Final = 3
"""Renewals in one time to live: two of them may get lost."""

Held: TypeAlias = Mapping[Uid, int]
"""Rows with the fencing tokens under which they are held."""


class HeldLeases:
    """The rows that one worker holds for one stage. Its owner changes it; any thread may read it."""

    def __init__(self, stage: str, worker: str, lost: Callable[[Held], None]) -> None:
        """`lost` is called, in the owner's event loop, with rows that are held no longer."""
        self.stage = stage
        self.worker = worker
        self.lost = lost
        self.began: Callable[[], None] = lambda: None
        """Called when there is something to renew again; the renewing code sets it."""
        self._ttl_s = FIRST_TTL_S
        self._rows: dict[Uid, int] = {}
        self._lock = threading.Lock()

    @property
    def period_s(self) -> float:
        """Between two renewals."""
        return self._ttl_s / RENEWALS

    def add(self, rows: Iterable[LeasedRow], ttl_s: float) -> None:
        """Add leased rows."""
        with self._lock:
            began = not self._rows
            self._ttl_s = ttl_s
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
        """Those of `rows` that are held under the same token: an answer may come after the next lease of a row."""
        with self._lock:
            return [uid for uid, token in rows.items() if self._rows.get(uid) == token]


class Renews(Protocol):
    """The method of the Queue port that `renewing` needs."""

    async def renew(self, run: str, stage: str, worker: str, uids: Sequence[Uid]) -> Sequence[Uid]:
        """See Queue."""
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
