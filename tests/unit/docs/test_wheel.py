"""The wheel has the product with its recipes, and no tests."""

from __future__ import annotations

from pathlib import Path

import pytest

wheel = pytest.importorskip("hatchling.builders.wheel")
ROOT = Path(__file__).parents[3]
ROOMS = {"common", "proto", "transferqueue", "rollout", "rewardd", "trainer", "services", "recipes"}


def test_the_wheel_has_the_rooms_and_the_recipes_and_nothing_of_the_tests() -> None:
    files = list(wheel.WheelBuilder(str(ROOT)).recurse_included_files())
    assert {Path(file.path).relative_to(ROOT).parts[0] for file in files} == ROOMS
    names = {file.distribution_path for file in files}
    assert {name.split("/")[0] for name in names} == {"meshrl"}
    assert {"meshrl/testing/contract/queue_suite.py", "meshrl/planning/planner.py"} <= names
