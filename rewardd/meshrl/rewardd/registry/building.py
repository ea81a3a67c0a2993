"""Opens a registry, and builds the judge of each submitted version."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from meshrl.contract.errors import ConfigError
from meshrl.contract.types import Json
from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.judge import StartableJudge, judge_of
from meshrl.rewardd.pool.pool import PoolJudge
from meshrl.rewardd.pool.rule import FunctionSpec, RewardRule, read_rule
from meshrl.rewardd.registry.active_reward import ActiveRewardJudge, JudgeCache
from meshrl.rewardd.registry.registry import Registry
from meshrl.rewardd.registry.store import MANIFEST, SubmissionStore
from meshrl.rewardd.registry.types import Manifest
from meshrl.sandbox.sandbox import Sandbox, open_sandbox


@asynccontextmanager
async def open_registry(config: RewardConfig, directory: Path) -> AsyncIterator[Registry]:
    """The registry in `directory`, with the judge that scores the run started; closed at the end.

    Raises:
        ConfigError: what scores the run cannot be loaded.
        UserError: another service uses the directory.
    """
    rule = read_rule(config)

    def build(version: str) -> StartableJudge:
        if version == rule.reward_hash:
            return judge_of(rule, config)
        return _version_judge(store.directory(version), config)

    store = SubmissionStore(directory, config.registry.max_versions)
    cache = JudgeCache(build)
    judge = ActiveRewardJudge(cache, keep_samples=config.registry.keep_samples)
    try:
        registry = Registry(store, cache, judge, config, rule.reward_hash)
        await registry.start()
        yield registry
    finally:
        await judge.close()
        store.close()


def _version_judge(directory: Path, config: RewardConfig) -> PoolJudge:
    """The judge of a version in its sandbox, not started; its `reward_hash` is the version's.

    `directory` is named after the version's hash and holds its content and manifest.json.

    Raises:
        ConfigError: a dependency that is not installed here, or isolation that this machine cannot give.
    """
    manifest = Manifest.from_json(json.loads((directory / MANIFEST).read_bytes()))
    check_installed(manifest.deps)
    sandbox = submitted_sandbox(directory, config, limits=manifest.limits)
    rule = RewardRule(functions=(_function(directory / manifest.content, manifest),))
    return PoolJudge(rule, config, reward_hash=directory.name, sandbox=sandbox)


def check_installed(requirements: Iterable[str]) -> None:
    """Raises ConfigError for a dependency, `name` or `name==version`, that is not installed beside this service."""
    for requirement in requirements:
        name, _, wanted = requirement.partition("==")
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(
                f"dependency {requirement!r} is not installed beside the reward service: install it there"
            ) from None
        if wanted and wanted != version:
            raise ConfigError(
                f"dependency {requirement!r}: beside the reward service {version} is installed"
            )


def _function(content: Path, manifest: Manifest) -> FunctionSpec:
    module, _, function = manifest.entry_point.rpartition(":")
    return FunctionSpec(
        component=function,
        weight=1.0,
        kwargs={},
        name=function,
        module=module,
        path=str(content),
        source="" if manifest.is_wheel else content.read_text(encoding="utf-8-sig"),
        kind=manifest.kind,
        digest=hashlib.sha256(content.read_bytes()).hexdigest()[:32],
    )


def submitted_sandbox(
    directory: Path,
    config: RewardConfig,
    *,
    limits: Mapping[str, Json] | None = None,
) -> Sandbox:
    """The sandbox of a submitted version: it sees its own directory.

    `reward.sandbox` sets the level; `limits` may not exceed `reward.limits`.

    Raises:
        ConfigError: a limit that is unknown or too wide; isolation that this machine cannot give.
    """
    return open_sandbox(
        config.sandbox,
        config.submitted_limits.bounded(limits or {}),
        readable=(directory,),
    )
