"""Rewards that agents post: a row with a posted reward is not scored by a judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from meshrl.contract.ports import Judge
from meshrl.contract.types import Outcome, Sample, Score

POSTED: Final = "posted_reward"
"""In a sample's `extra_info`: `{"score": number, "components": {name: number}}`. Stored with the row, so that it
also counts when rows are scored again."""


async def score_unposted(judge: Judge, samples: Sequence[Sample]) -> Sequence[Score]:
    """One Score per sample, in order: the posted reward, or else that of `judge`; all with the judge's hash."""
    unposted = [sample for sample in samples if POSTED not in sample.extra_info]
    judged = iter(await judge.score(unposted) if unposted else ())
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
