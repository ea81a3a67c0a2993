"""The judge of a recipe: its functions and its other judges, with their weights, and the rewards that agents post.

    reward = Σ weight · score        unless a gated part scores below its gate: then that part alone, weight · score

If a part rewards tokens, so does the sum; the scores of parts that do not are added at the last token. If one part
gives no score, the sample gets none: an incomplete sum would be a wrong reward. A row with a posted reward is not
scored by a judge. GDPO weighs components itself (`algorithm.gdpo_reward_keys`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, Protocol

import pydantic

from meshrl.common.plugins import load
from meshrl.contract.errors import ConfigError
from meshrl.contract.ports import Judge
from meshrl.contract.types import Outcome, Sample, Score
from meshrl.rewardd.config import JUDGES, OTHER_PACKAGES, JudgeConfig, RewardConfig
from meshrl.rewardd.pool.pool import PoolJudge
from meshrl.rewardd.pool.rule import RewardRule, read_rule


class StartableJudge(Judge, Protocol):
    """A Judge that is started before it scores."""

    async def start(self) -> None:
        """Get ready to score. Raises ConfigError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedJudge:
    """One judge among several."""

    label: str
    """The name of its component; empty for the functions, whose components have their own names."""
    judge: StartableJudge
    weight: float = 1.0
    gate: float | None = None
    """Below this score the reward is this part's weighted score alone."""


class CompositeJudge(StartableJudge):
    """Several judges as one."""

    def __init__(self, parts: Sequence[WeightedJudge], reward_hash: str) -> None:
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
                return self._fault(sample, score.outcome, named, lasting=score.lasting)
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
                return self._fault(sample, Outcome.INFRA_FAULT, reason, lasting=True)
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

    def _fault(self, sample: Sample, outcome: Outcome, reason: str, *, lasting: bool) -> Score:
        return Score(
            uid=sample.uid,
            outcome=outcome,
            reason=reason,
            reward_hash=self._hash,
            lasting=lasting,
        )


def build_judge(config: RewardConfig) -> PoolJudge | CompositeJudge:
    """The judge that a recipe describes, not started yet.

    Raises:
        ConfigError: an unknown reward or judge, a file that is missing or does not define the function.
    """
    return judge_of(read_rule(config), config)


def judge_of(rule: RewardRule, config: RewardConfig) -> PoolJudge | CompositeJudge:
    """Build the judge of `build_judge` for a rule that has been read. Raises ConfigError."""
    functions = PoolJudge(rule, config) if rule.functions else None
    if functions is not None and not config.judges:
        return functions
    parts = [] if functions is None else [WeightedJudge(label="", judge=functions)]
    return CompositeJudge([*parts, *map(build_part, config.judges)], rule.reward_hash)


def build_part(config: JudgeConfig) -> WeightedJudge:
    """One entry of `reward.judges`, with its place in the sum.

    Raises:
        ConfigError: an unknown kind, or options that it does not take; says which it takes.
    """
    module = OTHER_PACKAGES.get(config.kind, config.kind)
    try:
        build, options = load(JUDGES, module, "build"), load(JUDGES, module, "Config")
    except ImportError as error:
        raise ConfigError(
            f"reward.judges: {config.kind!r} cannot be imported: {error} (pip install 'meshrl[rewards]', or [torch])"
        ) from error
    return WeightedJudge(
        label=config.component,
        judge=_build(config, build, options),
        weight=config.weight,
        gate=config.gate,
    )


def _build(config: JudgeConfig, build: Any, options: Any) -> StartableJudge:
    try:
        checked = options(**config.options)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "options"
        takes = ", ".join(options.model_fields)
        raise ConfigError(
            f"options of judge {config.component!r}: {where}: {first['msg']} (it takes: {takes})"
        ) from error
    judge: StartableJudge = build(checked)
    return judge


POSTED: Final = "posted_reward"
"""Key in `extra_info` of `{"score": number, "components": {name: number}}`. Stored with the row, so that it
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
