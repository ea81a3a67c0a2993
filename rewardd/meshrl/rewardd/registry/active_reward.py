"""The judge of a run whose reward may change while it trains: scores with the current version.

    score ──▶ current ──▶ scores (all of one call by one version)
                 └── a share of them ──▶ watched ──▶ Differences      in the background, bounded

A call that runs while the version changes ends with the version it began with, and its scores carry that hash. So a
batch may get rows of two versions; `meshrl.trainer.reward_version_guard` gives each batch a single one.
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
"""Most calls of the watched version at once; rows beyond that are skipped and counted."""


class ActiveRewardJudge:
    """Implements the Judge port. Call `follow` before the first `score`."""

    def __init__(self, cache: JudgeCache, *, keep_samples: int) -> None:
        self._cache = cache
        self._current = ""
        self._watched, self._share = "", 0.0
        self._watching: set[asyncio.Task[None]] = set()
        self.differences: Differences | None = None
        """Of the current watch or the last one."""
        self.recent: deque[Sample] = deque(maxlen=keep_samples)
        """The samples scored last, the newest at the end."""

    @property
    def reward_hash(self) -> str:
        """The version that scores now."""
        return self._current

    async def follow(self, version: str, watched: str = "", share: float = 0.0) -> None:
        """Score with `version` from now on, and a `share` (0 to 1) of the rows with `watched` too.

        Raises:
            ConfigError, NotFoundError: it cannot be loaded; the version before goes on scoring.
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
        differences = self.differences
        if not self._watched or differences is None:
            return
        chosen = [
            (sample, score)
            for sample, score in zip(samples, scores, strict=True)
            if zlib.crc32(str(sample.uid).encode(errors="replace")) < self._share * 2**32
        ]
        if not chosen:
            return
        if len(self._watching) >= WATCH_CALLS:
            differences.skipped += len(chosen)
            return
        task = asyncio.create_task(self._compare(chosen, differences), name="reward-watch")
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _compare(
        self, chosen: Sequence[tuple[Sample, Score]], differences: Differences
    ) -> None:
        try:
            async with self._cache.borrow(differences.b) as judge:
                samples = [sample for sample, _ in chosen]
                others = await score_unposted(judge, samples)
        except MeshError as error:
            log.warning("the watched reward version %s does not score: %s", differences.b, error)
            differences.skipped += len(chosen)
            return
        differences.add(zip(samples, (score for _, score in chosen), others, strict=True))
