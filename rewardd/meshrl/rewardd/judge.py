"""Builds the judge of a recipe: its functions and its other judges, with their weights."""

from __future__ import annotations

from typing import Any

import pydantic

from meshrl.common.plugins import load
from meshrl.contract.errors import ConfigError
from meshrl.rewardd.config import JUDGES, OTHER_PACKAGES, JudgeConfig, RewardConfig
from meshrl.rewardd.judges._composite import CompositeJudge, Part, StartableJudge
from meshrl.rewardd.pool.pool import PoolJudge
from meshrl.rewardd.pool.rule import Rule, read_rule


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
