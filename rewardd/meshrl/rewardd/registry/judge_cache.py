"""A cache of judges by version: starts them on demand and closes those not used for a while.

consumes: versions. waits for: a judge's start. unblocked by: its start deadline. produces: started judges, each
closed only when nobody holds it, so a new version never interrupts rows that are being scored.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from meshrl.rewardd.judge import StartableJudge


@dataclass(slots=True, eq=False)
class _Entry:
    judge: StartableJudge
    holders: int = 0


class JudgeCache:
    """Keeps at most `spare` judges that nobody holds."""

    def __init__(self, build: Callable[[str], StartableJudge], *, spare: int = 2) -> None:
        self._build = build
        self._spare = spare
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    async def hold(self, version: str) -> StartableJudge:
        """The started judge of `version`, until `release`.

        Raises:
            NotFoundError: no such version.
            ConfigError: it cannot be loaded.
        """
        entry = self._entries.get(version)
        if entry is None:
            entry = self._entries[version] = _Entry(self._build(version))
        self._entries.move_to_end(version)
        entry.holders += 1
        try:
            await entry.judge.start()
        except BaseException:
            self._release(version, entry, broken=True)
            raise
        return entry.judge

    def release(self, version: str) -> None:
        """The inverse of one `hold`."""
        self._release(version, self._entries[version])

    @asynccontextmanager
    async def borrow(self, version: str) -> AsyncIterator[StartableJudge]:
        """Hold `version` while the body runs."""
        judge = await self.hold(version)
        try:
            yield judge
        finally:
            self.release(version)

    async def close(self) -> None:
        """Close every judge; idempotent."""
        while self._entries:
            self._close(self._entries.popitem()[1])
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _release(self, version: str, entry: _Entry, *, broken: bool = False) -> None:
        entry.holders -= 1
        if broken and not entry.holders and self._entries.get(version) is entry:
            self._close(self._entries.pop(version))
        idle = [v for v, e in self._entries.items() if not e.holders]
        for surplus in idle[: max(0, len(idle) - self._spare)]:
            self._close(self._entries.pop(surplus))

    def _close(self, entry: _Entry) -> None:
        closing = asyncio.ensure_future(entry.judge.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
