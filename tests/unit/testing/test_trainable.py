from __future__ import annotations

import pytest

from tests.doubles.trainable import tried

KINDS = (
    "bart",
    "bloom",
    "falcon",
    "gpt2",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "nemotron",
    "phi",
    "phimoe",
    "nemotron_h",
    "qwen3_5_text",
    "qwen3_next",
    "stablelm",
)
"""One type for each outcome; `python -m tests.doubles.trainable` tries all types, which takes minutes."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_of_a_recipe_says_of_a_model_what_the_trainer_finds(kind: str) -> None:
    found, said = tried(kind)
    assert bool(found) == bool(said), (found, said)
