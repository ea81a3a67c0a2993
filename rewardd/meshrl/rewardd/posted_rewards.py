"""Rewards that agents post: a row whose agent says what it is worth is not asked about again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from meshrl.contract.ports import Judge
from meshrl.contract.types import Outcome, Sample, Score

POSTED: Final = "posted_reward"
"""In a sample's `extra_info`: `{"score": number, "components": {name: number}}`. Kept with the row, so that it counts
again when rows are scored again."""


async def score_unposted(judge: Judge, samples: Sequence[Sample]) -> Sequence[Score]:
    """One Score per sample, in order: what was posted, or else what `judge` says; all under the judge's hash."""
    asked = [sample for sample in samples if POSTED not in sample.extra_info]
    judged = iter(await judge.score(asked) if asked else ())
    return [
        _posted(sample, judge.reward_hash) if POSTED in sample.extra_info else next(judged)
        for sample in samples
    ]


def _posted(sample: Sample, reward_hash: str) -> Score:
    reward = sample.extra_info[POSTED]
    return Score(
        uid=sample.uid,
        outcome=Outcome.OK,
        score=reward["score"],
        components=reward["components"],
        reward_hash=reward_hash,
    )
