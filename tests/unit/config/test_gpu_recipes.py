"""The recipes for one GPU and for eight: they fit the machines that stand beside them, as their tables say."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.config import load_recipe
from meshrl.config.loading import Written
from meshrl.config.machine import GIB, AssumedMachine, Assumptions
from meshrl.config.placement import place

RECIPES = Path(__file__).parents[3] / "recipes"
IN_TURNS = (
    "placement.colocate=time_sliced",
    "queue.max_staleness=0",
    "rollout.on_update=drain",
)


@pytest.mark.parametrize(
    ("folder", "variants"),
    [
        ("one_gpu", [(), ("model.lora_rank=32", "actor.optim.lr=1e-4"), IN_TURNS]),
        ("eight_gpus", [(), ("actor.use_kl_loss=true",)]),
        ("geo3k", [()]),
    ],
)
def test_a_recipe_for_gpus_is_good_and_takes_what_its_table_says(
    folder: str, variants: list[tuple[str, ...]]
) -> None:
    assumed = Written.read(RECIPES / folder / "machine.yaml", ()).as_config(Assumptions)
    rows = []
    for overrides in variants:
        machine = AssumedMachine(assumed)
        loaded = load_recipe(RECIPES / folder / "recipe.yaml", overrides, machine=machine)
        assert (loaded.model.param_dtype, loaded.rollout.name) == ("bfloat16", "vllm")
        for name, at in place(loaded, machine).places.items():
            assert at.need is not None
            cells = (name, ",".join(at.share.devices), f"{at.share.memory:.0%}")
            rows.append((*cells, f"{at.need.total / GIB:.1f}"))
    table = (RECIPES / folder / "README.md").read_text().splitlines()
    written = [tuple(map(str.strip, line.split("|")[2:-1])) for line in table if "%" in line]
    assert written == rows


@pytest.mark.filterwarnings("ignore")  # the package's own
def test_the_recipe_of_reasoning_gym_is_good_for_a_real_model() -> None:
    """Its tasks are made at each level, if the package is here."""
    pytest.importorskip("reasoning_gym")
    folder = RECIPES / "reasoning_gym"
    assumed = Written.read(folder / "machine.yaml", ()).as_config(Assumptions)
    loaded = load_recipe(folder / "recipe.yaml", (), machine=AssumedMachine(assumed))
    assert loaded.data.reasoning_gym and loaded.data.reasoning_gym.curriculum
