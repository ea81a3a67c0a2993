"""Puts the parts of a registry together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.judge import judge_of
from meshrl.rewardd.judges._composite import StartableJudge
from meshrl.rewardd.pool.rule import read_rule
from meshrl.rewardd.registry.active_reward import ActiveRewardJudge
from meshrl.rewardd.registry.judge_cache import JudgeCache
from meshrl.rewardd.registry.registry import Registry
from meshrl.rewardd.registry.store import VersionStore
from meshrl.rewardd.registry.version_judge import version_judge


@asynccontextmanager
async def open_registry(config: RewardConfig, directory: Path) -> AsyncIterator[Registry]:
    """The registry in `directory`, its judge started with what scores the run; closed at the end.

    Raises:
        ConfigError: what scores the run cannot be loaded.
        UserError: another service has the directory.
    """
    rule = read_rule(config)

    def build(version: str) -> StartableJudge:
        if version == rule.reward_hash:
            return judge_of(rule, config)
        return version_judge(store.directory(version), config)

    store = VersionStore(directory, config.registry.max_versions)
    shelf = JudgeCache(build)
    judge = ActiveRewardJudge(shelf, keep_samples=config.registry.keep_samples)
    try:
        registry = Registry(store, shelf, judge, config, rule.reward_hash)
        await registry.start()
        yield registry
    finally:
        await judge.close()
        store.close()
