"""The Judge of a run whose reward may change while it trains: scores with the version of the moment.

    score ──▶ current ──▶ scores (all of one call by one version)
                 └── a share of them ──▶ watched ──▶ Differences      beside, bounded, never waited for

A call under way when the version changes ends under the version it began with, and its scores say so. That rows of
two versions meet in a batch is therefore normal here; `meshrl.trainer.reward_version_guard` gives each batch one.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import deque
from collections.abc import Sequence

from meshrl.contract.errors import MeshError
from meshrl.contract.types import Sample, Score
from meshrl.rewardd.posted_rewards import score_unposted
from meshrl.rewardd.registry.comparison import Differences
from meshrl.rewardd.registry.judge_cache import JudgeCache

log = logging.getLogger(__name__)

WATCH_CALLS = 4
"""Calls that the watched version may be behind; rows beyond that are skipped and counted."""


class ActiveRewardJudge:
    """Implements the Judge port. `follow` before the first `score`."""

    def __init__(self, cache: JudgeCache, *, keep_samples: int) -> None:
        self._cache = cache
        self._current = ""
        self._watched, self._share = "", 0.0
        self._watching: set[asyncio.Task[None]] = set()
        self.differences: Differences | None = None
        """Of the watch under way or the last one."""
        self.recent: deque[Sample] = deque(maxlen=keep_samples)
        """What was scored last, the newest at the end."""

    @property
    def reward_hash(self) -> str:
        """The version that scores now."""
        return self._current

    async def follow(self, version: str, watched: str = "", share: float = 0.0) -> None:
        """Score with `version` from now on, and with `watched` a `share` of the rows beside it.

        Raises:
            ConfigError, NotFoundError: it cannot be loaded; what scored before goes on.
        """
        if version != self._current:
            await self._cache.hold(version)
            before, self._current = self._current, version
            if before:
                self._cache.release(before)
                log.info("the reward is now version %s, it was %s", version, before)
        if (watched, share) != (self._watched, self._share):
            self._watched, self._share = watched, share
        if watched and (
            self.differences is None
            or self.differences.b != watched
            or self.differences.a != version
        ):
            self.differences = Differences(a=version, b=watched)

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """One Score per sample, in order, all by the same version."""
        async with self._cache.borrow(self._current) as judge:
            scores = await score_unposted(judge, samples)
        self.recent.extend(samples)
        self._watch(samples, scores)
        return scores

    async def score_with(self, version: str, samples: Sequence[Sample]) -> Sequence[Score]:
        """As `score`, by `version`. Raises NotFoundError."""
        async with self._cache.borrow(version) as judge:
            return await score_unposted(judge, samples)

    async def close(self) -> None:
        """End every judge; idempotent."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self._cache.close()

    def _watch(self, samples: Sequence[Sample], scores: Sequence[Score]) -> None:
        found = self.differences
        if not self._watched or found is None:
            return
        chosen = [
            (sample, score)
            for sample, score in zip(samples, scores, strict=True)
            if zlib.crc32(str(sample.uid).encode(errors="replace")) < self._share * 2**32
        ]
        if not chosen:
            return
        if len(self._watching) >= WATCH_CALLS:
            found.skipped += len(chosen)
            return
        task = asyncio.create_task(self._compare(chosen, found), name="reward-watch")
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _compare(self, chosen: Sequence[tuple[Sample, Score]], found: Differences) -> None:
        try:
            async with self._cache.borrow(found.b) as judge:
                others = await score_unposted(judge, [sample for sample, _ in chosen])
        except MeshError as error:
            log.warning("the watched reward version %s does not score: %s", found.b, error)
            found.skipped += len(chosen)
            return
        found.add(zip((score for _, score in chosen), others, strict=True))
