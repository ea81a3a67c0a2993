"""The judges of submitted versions, and the judge of a run: it scores with the version that is current.

A call ends with the version that it began with, and its scores carry that hash. So a batch may get rows of two
versions; `meshrl.trainer.loop.reward_guard` gives each batch a single one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from meshrl.contract.ports import Judge
from meshrl.contract.types import Sample, Score
from meshrl.rewardd.judge import StartableJudge, score_unposted

SPARE = 2
"""Idle judges that are kept."""


@dataclass(slots=True, eq=False)
class _Entry:
    judge: StartableJudge
    holders: int = 0


class JudgeCache:
    """Judges by version: started on demand, at most SPARE idle ones kept.

    consumes: versions. waits for: a judge's start. unblocked by: its start deadline. produces: started judges, each
    closed only when it is idle, so a new version never interrupts rows that are being scored.
    """

    def __init__(self, build: Callable[[str], StartableJudge]) -> None:
        self._build = build
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

    def held(self, version: str) -> bool:
        """Whether anybody holds `version`."""
        return version in self._entries and self._entries[version].holders > 0

    def release(self, version: str) -> None:
        """Undo one `hold`."""
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
        for surplus in idle[: max(0, len(idle) - SPARE)]:
            self._close(self._entries.pop(surplus))

    def _close(self, entry: _Entry) -> None:
        closing = asyncio.ensure_future(entry.judge.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


log = logging.getLogger(__name__)


class ActiveRewardJudge(Judge):
    """The judge of the version that is active. Call `follow` before the first `score`."""

    def __init__(self, cache: JudgeCache, *, keep_samples: int) -> None:
        self._cache = cache
        self._current = ""
        self.recent: deque[Sample] = deque(maxlen=keep_samples)
        """The samples scored last, the newest at the end."""

    @property
    def reward_hash(self) -> str:
        """The version that scores now."""
        return self._current

    async def follow(self, version: str) -> None:
        """Score with `version` from now on.

        Raises:
            ConfigError, NotFoundError: it cannot be loaded; the version before continues scoring.
        """
        if version != self._current:
            await self._cache.hold(version)
            before, self._current = self._current, version
            if before:
                self._cache.release(before)
                log.info("the reward is now version %s, it was %s", version, before)

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """One Score per sample, in order, all by the same version."""
        async with self._cache.borrow(self._current) as judge:
            scores = await score_unposted(judge, samples)
        self.recent.extend(samples)
        return scores

    async def score_with(self, version: str, samples: Sequence[Sample]) -> Sequence[Score]:
        """Score the samples with `version`, otherwise as `score` does. Raises NotFoundError."""
        async with self._cache.borrow(version) as judge:
            return await score_unposted(judge, samples)

    async def close(self) -> None:
        """End every judge; idempotent."""
        await self._cache.close()
