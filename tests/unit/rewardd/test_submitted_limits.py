"""Limits and dependencies of submitted functions."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from meshrl.contract.errors import ConfigError
from meshrl.rewardd.config import START_DEADLINE_S, RewardConfig
from meshrl.rewardd.registry.building import check_installed
from meshrl.sandbox.limits import Limits, ScoringLimits
from meshrl.sandbox.sandbox import Isolation


def test_a_dependency_must_be_installed_beside_the_service() -> None:
    check_installed(["numpy", f"pydantic=={version('pydantic')}"])
    with pytest.raises(ConfigError, match="'pears' is not installed beside the reward service"):
        check_installed(["numpy", "pears"])
    with pytest.raises(
        ConfigError, match=r"'numpy==0\.1': beside the reward service \d.* is installed"
    ):
        check_installed(["numpy==0.1"])


def test_functions_of_a_recipe_have_the_limits_of_submitted_ones_in_a_sandbox() -> None:
    free, shut = RewardConfig(), RewardConfig(recipe_sandbox=Isolation.STRICT, deadline_s=3)
    assert (free.recipe_limits.memory_bytes, free.recipe_limits.processes) == (None, None)
    assert shut.recipe_limits == shut.submitted_limits.model_copy(
        update={"deadline_s": 3.0, "start_deadline_s": START_DEADLINE_S}
    )
    bounded = RewardConfig(limits=ScoringLimits(memory_bytes=1 << 29))
    assert (bounded.recipe_limits.memory_bytes, bounded.recipe_limits.processes) == (1 << 29, None)


def test_a_submission_may_ask_for_lower_limits_but_not_for_higher() -> None:
    bounds = Limits(deadline_s=5, cpu_s=None)
    assert bounds.bounded({"deadline_s": 1, "cpu_s": 3}).deadline_s == 1
    with pytest.raises(
        ConfigError, match=r"deadline_s = 6.0 exceeds what the operator allows \(5.0\)"
    ):
        bounds.bounded({"deadline_s": 6})
    with pytest.raises(ConfigError, match="memory_bytes = None exceeds"):
        bounds.bounded({"memory_bytes": None})
    with pytest.raises(ConfigError, match=r"no limit 'deadlines'; did you mean 'deadline_s'\?"):
        bounds.bounded({"deadlines": 1})
    with pytest.raises(ConfigError, match="limit deadline_s: "):
        bounds.bounded({"deadline_s": "soon"})
