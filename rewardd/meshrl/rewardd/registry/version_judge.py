"""From a version's directory to what scores with it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.judge import PoolJudge
from meshrl.rewardd.pool.rule import FunctionSpec, Rule
from meshrl.rewardd.registry.store import MANIFEST
from meshrl.rewardd.registry.types import Manifest
from meshrl.rewardd.sandbox.environment import environment_of
from meshrl.rewardd.sandbox.submitted_code import submitted_sandbox

ENVIRONMENTS = "environments"
"""Beside the versions: their dependencies."""


def version_rule(directory: Path) -> Rule:
    """What a content-addressed directory (content and manifest.json) says must run."""
    manifest = Manifest.from_json(json.loads((directory / MANIFEST).read_bytes()))
    content = directory / manifest.content
    module, _, function = manifest.entry_point.rpartition(":")
    spec = FunctionSpec(
        component=function,
        weight=1.0,
        kwargs={},
        name=function,
        module=module,
        path=str(content),
        source="" if manifest.is_wheel else content.read_text(encoding="utf-8"),
        kind=manifest.kind,
        digest=hashlib.sha256(content.read_bytes()).hexdigest()[:32],
    )
    return Rule(functions=(spec,))


def version_judge(directory: Path, config: RewardConfig) -> PoolJudge:
    """The judge of a version in its cell, not started; its `reward_hash` is the version's.

    Raises:
        ConfigError: a dependency that cannot be had, or isolation that this machine cannot give.
    """
    manifest = Manifest.from_json(json.loads((directory / MANIFEST).read_bytes()))
    environments = directory.parent.parent / ENVIRONMENTS
    cell = submitted_sandbox(
        directory,
        config,
        limits=manifest.limits,
        environment=environment_of(manifest.deps, config.wheelhouse, environments),
    )
    return PoolJudge(version_rule(directory), config, reward_hash=directory.name, cell=cell)
