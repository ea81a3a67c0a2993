"""From what a recipe says to its judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

from meshrl.contract.errors import ConfigError
from meshrl.contract.plugins import load
from meshrl.rewardd.config import JudgeConfig
from meshrl.rewardd.judges._composite import CompositeJudge, Part, StartableJudge

JUDGES = "meshrl.rewardd.judges"
ELSEWHERE: Mapping[str, str] = {"model": "meshrl.trainer.model.reward_model"}
"""Kinds that other rooms have, found by name: this one knows no torch."""


def build_part(config: JudgeConfig) -> Part:
    """One judge with its place in the sum.

    Raises:
        ConfigError: an unknown kind, or options that it does not take; says which it takes.
    """
    module = ELSEWHERE.get(config.kind, config.kind)
    try:
        build, options = load(JUDGES, module, "build"), load(JUDGES, module, "Config")
    except ImportError as error:
        raise ConfigError(
            f"reward.judges: {config.kind!r} cannot be imported: {error} (pip install 'meshrl[rewards]', or [torch])"
        ) from error
    return Part(
        label=config.component,
        judge=_built(config, build, options),
        weight=config.weight,
        gate=config.gate,
    )


def _built(config: JudgeConfig, build: Any, options: Any) -> StartableJudge:
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


def with_judges(
    functions: StartableJudge | None, configs: Sequence[JudgeConfig], reward_hash: str
) -> CompositeJudge:
    """The functions (if any) and the judges as one. Raises ConfigError."""
    parts = [] if functions is None else [Part(label="", judge=functions)]
    return CompositeJudge([*parts, *map(build_part, configs)], reward_hash)
