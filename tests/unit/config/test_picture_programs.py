"""What a recipe whose model reads pictures may not ask for: one line each, on the machine of recipes/geo3k."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshrl.config import load_recipe
from meshrl.config.loading import Written
from meshrl.config.machine import AssumedMachine, Assumptions
from meshrl.contract.errors import ConfigError

FOLDER = Path(__file__).parents[3] / "recipes" / "geo3k"
AGENT = "rollout.program_options={function: recipes/vision/game.py:play"


def check(*overrides: str, **changes: Any) -> None:
    assumed = Written.read(FOLDER / "machine.yaml", ()).as_config(Assumptions)
    machine = AssumedMachine(assumed.model_copy(update=changes))
    load_recipe(FOLDER / "recipe.yaml", overrides, machine=machine)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("rollout.name=torch",), "rollout.name: torch reads text only"),
        (
            ("rollout.name=sglang", "rollout.engine={update: disk}"),
            "rollout.engine.update: disk leaves SGLang what the old vision tower made",
        ),
        (
            ("rollout.program=verifiers", "rollout.program_options={id: x}"),
            "rollout.program: verifiers loses the pictures of a prompt; want single_turn, tools",
        ),
        (
            ("rollout.program=openai", AGENT + ", branch: each}"),
            "rollout.program_options.branch: each trains text only; want last",
        ),
        (("trainer.parallel.tensor=2",), "trainer.parallel.tensor: a model that reads pictures"),
        (("data.image_key=pictures",), "'images' cannot be used"),
    ],
)
def test_what_would_lose_the_pictures_is_refused(overrides: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(*overrides)
    assert problem in str(caught.value)


def test_a_package_that_pictures_need_is_named() -> None:
    packages = {"vllm": True, "cupy": True, "sympy": True, "msgpack": True, "PIL": False}
    with pytest.raises(ConfigError, match=r"pictures need pillow: pip install 'meshrl\[vision\]'"):
        check(packages=packages)


@pytest.mark.parametrize(
    "overrides",
    [
        ("rollout.program=user", AGENT + ", posts_reward: true}"),
        ("rollout.program=openai", AGENT + "}"),
        ("model.freeze_vision_tower=false",),
    ],
)
def test_programs_of_several_turns_may_have_pictures(overrides: tuple[str, ...]) -> None:
    check(*overrides)
