"""Builds the judge of a recipe; `PoolJudge` scores samples with a pool of scoring processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from meshrl.contract.errors import ConfigError
from meshrl.contract.plugins import load
from meshrl.contract.types import Sample, Score
from meshrl.rewardd.config import JudgeConfig, RewardConfig
from meshrl.rewardd.judges._composite import CompositeJudge, Part, StartableJudge
from meshrl.rewardd.pool.pool import ScoringPool
from meshrl.rewardd.pool.rule import Rule, read_rule
from meshrl.rewardd.sandbox.sandbox import Sandbox, open_sandbox

JUDGES = "meshrl.rewardd.judges"
OTHER_PACKAGES: Mapping[str, str] = {"model": "meshrl.trainer.model.reward_model"}
"""Kinds that live in another package and are imported by name, because this package imports no torch."""


class PoolJudge:
    """Implements the Judge port for one rule."""

    def __init__(
        self,
        rule: Rule,
        config: RewardConfig,
        *,
        reward_hash: str = "",
        sandbox: Sandbox | None = None,
    ) -> None:
        """Keep the parts; `reward_hash` names a submitted version, else the rule's own hash counts.

        Without a `sandbox` the functions are the recipe's own, and `reward.recipe_sandbox` sets their isolation.

        Raises:
            ConfigError: this machine cannot give the wanted isolation.
        """
        self._hash = reward_hash or rule.reward_hash
        self._pool = ScoringPool(rule, config, sandbox or _recipe_sandbox(rule, config))

    @property
    def reward_hash(self) -> str:
        """Content hash of sources, names, arguments and weights."""
        return self._hash

    @property
    def pids(self) -> list[int]:
        """Of the scoring processes."""
        return self._pool.pids

    async def start(self) -> None:
        """Start the scoring processes and load the functions; otherwise the first `score` does so.

        Raises:
            ConfigError: a function cannot be loaded or called; says what is wanted.
        """
        await self._pool.start()

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """One Score per sample, in order. A sample that cannot be scored comes back with its fault."""
        results = await self._pool.score(
            [
                {
                    "data_source": sample.data_source,
                    "solution_str": sample.solution,
                    "ground_truth": sample.ground_truth,
                    "extra_info": dict(sample.extra_info),
                }
                for sample in samples
            ]
        )
        return [
            Score(
                uid=sample.uid,
                outcome=result.outcome,
                score=result.score,
                components=result.components,
                reason=result.reason,
                reward_hash=self._hash,
                token_rewards=result.token_rewards,
            )
            for sample, result in zip(samples, results, strict=True)
        ]

    async def close(self) -> None:
        """End every scoring process; idempotent."""
        await self._pool.close()


def _recipe_sandbox(rule: Rule, config: RewardConfig) -> Sandbox:
    """At level `strict` functions see the folders of their files, so that they can import from them."""
    folders = {Path(function.path).parent for function in rule.functions if function.source}
    return open_sandbox(config.recipe_sandbox, config.recipe_limits, readable=sorted(folders))


def build_judge(config: RewardConfig) -> PoolJudge | CompositeJudge:
    """The judge that a recipe describes, not started yet.

    Raises:
        ConfigError: an unknown reward or judge, a file that is missing or does not define the function.
    """
    return judge_of(read_rule(config), config)


def judge_of(rule: Rule, config: RewardConfig) -> PoolJudge | CompositeJudge:
    """As `build_judge`, with a rule that has been read. Raises ConfigError."""
    functions = PoolJudge(rule, config) if rule.functions else None
    if functions is not None and not config.judges:
        return functions
    parts = [] if functions is None else [Part(label="", judge=functions)]
    return CompositeJudge([*parts, *map(build_part, config.judges)], rule.reward_hash)


def build_part(config: JudgeConfig) -> Part:
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
    return Part(
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
