"""Several judges as one: the weighted sum of their scores; each score is a component named by its label.

    reward = Σ weight · score        unless a gated part scores below its gate: then that part alone, weight · score

If a part rewards tokens, so does the sum; the scores of parts that do not are added at the last token.

GDPO weighs components itself (`algorithm.gdpo_reward_keys`). If one part gives no score, the sample gets none: an
incomplete sum would be a wrong reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

from meshrl.contract.ports import Judge
from meshrl.contract.types import Outcome, Sample, Score


class StartableJudge(Judge, Protocol):
    """A Judge that is started before it scores."""

    async def start(self) -> None:
        """Get ready to score. Raises ConfigError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One judge among several."""

    label: str
    """The name of its component; empty for the functions, whose components have their own names."""
    judge: StartableJudge
    weight: float = 1.0
    gate: float | None = None
    """Below this score the reward is this part's weighted score alone."""


class CompositeJudge(StartableJudge):
    """Several judges as one."""

    def __init__(self, parts: Sequence[Part], reward_hash: str) -> None:
        self._parts = tuple(parts)
        self._hash = reward_hash

    @property
    def reward_hash(self) -> str:
        """Hash of what the recipe says about the parts."""
        return self._hash

    async def start(self) -> None:
        """Start every part. Raises ConfigError."""
        await asyncio.gather(*(part.judge.start() for part in self._parts))

    async def close(self) -> None:
        """Close every part; idempotent."""
        await asyncio.gather(*(part.judge.close() for part in self._parts))

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """One Score per sample, in order; all parts score at the same time."""
        columns = await asyncio.gather(*(part.judge.score(samples) for part in self._parts))
        return [
            self._combine(sample, scores)
            for sample, scores in zip(samples, zip(*columns, strict=True), strict=True)
        ]

    def _combine(self, sample: Sample, scores: Sequence[Score]) -> Score:
        for part, score in zip(self._parts, scores, strict=True):
            if not score.outcome.trainable:
                named = f"{part.label}: {score.reason}" if part.label else score.reason
                return self._fault(sample, score.outcome, named)
        total, outcome, components = 0.0, Outcome.OK, dict[str, float]()
        texts: dict[str, str] = {}
        gated: float | None = None
        tokens, plain = list[float](), 0.0
        for part, score in zip(self._parts, scores, strict=True):
            total += part.weight * score.score
            if part.gate is not None and score.score < part.gate and gated is None:
                gated = part.weight * score.score
            if score.token_rewards is None:
                plain += part.weight * score.score
            elif tokens and len(tokens) != len(score.token_rewards):
                reason = (
                    f"{part.label}: {len(score.token_rewards)} token_rewards, others {len(tokens)}"
                )
                return self._fault(sample, Outcome.INFRA_FAULT, reason)
            else:
                weighted = (part.weight * reward for reward in score.token_rewards)
                tokens = [a + b for a, b in zip_longest(tokens, weighted, fillvalue=0.0)]
            if score.outcome is Outcome.POLICY_FAULT:
                outcome = score.outcome
            prefix = f"{part.label}." if part.label else ""
            components |= {prefix + key: value for key, value in score.components.items()}
            texts |= {prefix + key: text for key, text in score.texts.items()}
            if part.label:
                components[part.label] = score.score
        if tokens:
            tokens[-1] += plain
        return Score(
            uid=sample.uid,
            outcome=outcome,
            score=total if gated is None else gated,
            components=components,
            reward_hash=self._hash,
            token_rewards=tuple(tokens) if tokens and gated is None else None,
            texts=texts,
        )

    def _fault(self, sample: Sample, outcome: Outcome, reason: str) -> Score:
        return Score(uid=sample.uid, outcome=outcome, reason=reason, reward_hash=self._hash)
