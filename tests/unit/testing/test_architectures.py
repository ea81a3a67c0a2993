from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.trainer.ranks.world import World
from tests.doubles.architectures import KINDS, Tried, attempt

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "models.md"


def listed() -> dict[str, Tried]:
    """The lines of the page's first table."""
    first = PAGE.read_text().partition("\n## ")[0]
    rows = [line.strip("| ").split("|") for line in first.splitlines() if "|" in line]
    cells = [[cell.strip() for cell in row] for row in rows[2:]]
    return {name: Tried(name, *rest, *[""] * (6 - len(rest))) for name, *rest in cells}


def test_the_page_of_models_has_every_architecture_that_the_command_tries() -> None:
    assert list(listed()) == list(KINDS)


OFTEN = ("DeepseekV3", "GptOss", "Mixtral", "Llama4Text")
SWEEP = [pytest.param(each, marks=pytest.mark.nightly) for each in KINDS if each not in OFTEN]


@pytest.mark.parametrize("name", [*OFTEN, *SWEEP])
def test_an_architecture_comes_out_as_the_page_says(
    name: str, tmp_path: Path, world: World
) -> None:
    found, said = attempt(name, tmp_path, world), listed()[name]
    for figure in ("logprobs", "gradients", "served"):
        mine, theirs = getattr(found, figure), getattr(said, figure)
        if theirs in ("", "no"):
            assert mine == theirs
        else:
            assert float(mine) < 1e-4 and float(theirs) < 1e-4
    assert (found.published, found.note) == (said.published, said.note)
