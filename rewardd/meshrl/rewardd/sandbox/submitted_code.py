"""The cell of a submitted version: what it sees is its own directory and its dependencies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from meshrl.contract.types import Json
from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.sandbox.environment import Environment
from meshrl.rewardd.sandbox.sandbox import Cell, open_sandbox


def submitted_sandbox(
    directory: Path,
    config: RewardConfig,
    *,
    limits: Mapping[str, Json] | None = None,
    environment: Environment | None = None,
) -> Cell:
    """As strict as `reward.sandbox` says, with `limits` no wider than `reward.limits`.

    `directory` holds the version's content; `environment` is built when the judge starts.

    Raises:
        ConfigError: a limit that is unknown or too wide; isolation that this machine cannot give.
    """
    return open_sandbox(
        config.sandbox,
        config.limits.bounded(limits or {}),
        readable=(directory,),
        search=(environment.path,) if environment else (),
        prepare=environment.build if environment else None,
    )
