"""The judge of a run whose reward may change while it trains: scores with the current version.

A call ends with the version that it began with, and its scores carry that hash. So a batch may get rows of two
versions; `meshrl.trainer.loop.reward_guard` gives each batch a single one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from meshrl.contract.ports import Judge
from meshrl.contract.types import Sample, Score
from meshrl.rewardd.judge import score_unposted
from meshrl.rewardd.registry.judge_cache import JudgeCache

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
            ConfigError, NotFoundError: it cannot be loaded; the version before goes on scoring.
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
        """As `score`, by `version`. Raises NotFoundError."""
        async with self._cache.borrow(version) as judge:
            return await score_unposted(judge, samples)

    async def close(self) -> None:
        """End every judge; idempotent."""
        await self._cache.close()
