"""Defaults of a recipe on machines with and without GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.config import Recipe, load_recipe
from meshrl.config.checks import warnings
from meshrl.config.device_defaults import hints, with_device_defaults
from meshrl.config.loading import Written, save_recipe
from meshrl.config.machine import GIB, AssumedMachine, Assumptions
from meshrl.config.placement import place
from meshrl.config.weights import NcclConfig, WeightsConfig
from meshrl.contract.errors import ConfigError


def machine(gpus: int, *, vllm: bool = False, beside: bool = False) -> AssumedMachine:
    return AssumedMachine(
        Assumptions(gpus=gpus, packages={"vllm": vllm}, programs={".venv-vllm/bin/python": beside})
    )


def decided(tmp_path: Path, there: AssumedMachine, *overrides: str) -> Recipe:
    path = tmp_path / "my.yaml"
    path.write_text(f"run: {{dir: {tmp_path / 'run'}}}\nmodel: {{path: model}}\n")
    return load_recipe(path, overrides, check=False, machine=there)


def types(recipe: Recipe) -> tuple[str, str]:
    return recipe.model.param_dtype, recipe.weights.dtype


@pytest.mark.parametrize(
    ("gpus", "overrides", "wanted"),
    [
        (0, (), ("float32", "float32")),
        (0, ("model.param_dtype=bfloat16",), ("bfloat16", "float32")),
        (1, (), ("bfloat16", "bfloat16")),
        (8, ("model.param_dtype=float32",), ("float32", "float32")),
        (8, ("weights.dtype=float32",), ("bfloat16", "float32")),
        (8, ("trainer.device=cpu",), ("float32", "float32")),
        (8, ("placement.trainer=0",), ("float32", "float32")),
    ],
)
def test_on_a_gpu_the_trainer_computes_and_sends_in_16_bits(
    tmp_path: Path, gpus: int, overrides: tuple[str, ...], wanted: tuple[str, str]
) -> None:
    assert types(decided(tmp_path, machine(gpus), *overrides)) == wanted


def test_a_run_goes_on_with_the_types_it_began_with(tmp_path: Path) -> None:
    began = decided(tmp_path, machine(0))
    (began.checkpoint_dir / "step-5").mkdir(parents=True)
    save_recipe(began, began.run.path / "recipe.yaml")
    assert types(decided(tmp_path, machine(8))) == ("float32", "float32")
    assert types(decided(tmp_path, machine(8), "trainer.resume_mode=disable"))[0] == "bfloat16"
    assert types(decided(tmp_path, machine(8), "model.param_dtype=bfloat16"))[0] == "bfloat16"
    save_recipe(
        decided(tmp_path, machine(8), "trainer.resume_mode=disable"), began.run.path / "recipe.yaml"
    )
    assert types(decided(tmp_path, machine(0))) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("there", "overrides", "wanted"),
    [
        (machine(0, vllm=True), (), ("torch", None, False)),
        (machine(1, vllm=True), (), ("vllm", None, False)),
        (machine(1, beside=True), (), ("vllm", str(Path(".venv-vllm/bin/python").absolute()), False)),
        (machine(1), (), ("torch", None, True)),
        (machine(1, vllm=True), ("rollout.name=torch",), ("torch", None, False)),
        (machine(1, vllm=True), ("rollout.engine.device=cpu",), ("torch", None, True)),
        (machine(1, vllm=True), ("placement.rollout=0",), ("torch", None, False)),
    ],
)  # fmt: skip
def test_on_a_gpu_vllm_samples_where_it_is_installed_and_else_there_is_a_hint(
    tmp_path: Path,
    there: AssumedMachine,
    overrides: tuple[str, ...],
    wanted: tuple[str, str | None, bool],
) -> None:
    recipe = decided(tmp_path, there, *overrides)
    hinted = any(
        "rollout.name: torch, for no vLLM is known" in line for line in hints(recipe, there)
    )
    assert (recipe.rollout.name, recipe.rollout.engine.get("python"), hinted) == wanted
    assert with_device_defaults(recipe, there) == recipe


def test_float16_is_refused_because_nothing_scales_its_gradients(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float16 loses small gradients, for they are not scaled"):
        decided(tmp_path, machine(1), "model.param_dtype=float16")


def test_numbers_among_the_variables_of_a_process_are_words(tmp_path: Path) -> None:
    changed = ("weights.nccl.env.NCCL_DEBUG_LEVEL=1", "weights.nccl.env.NCCL_X=0.5")
    recipe = decided(tmp_path, machine(0), *changed, "rollout.engine={env: {N: 2}}")
    assert recipe.weights.nccl.env == {"NCCL_DEBUG_LEVEL": "1", "NCCL_X": "0.5"}
    assert NcclConfig(env={"A": "b"}).env == {"A": "b"}
    with pytest.raises(ConfigError, match=r"weights\.nccl\.env\.A: got \[1\], want text"):
        decided(tmp_path, machine(0), "weights.nccl.env.A=[1]")


def test_a_large_version_has_longer_to_be_switched_to() -> None:
    config = WeightsConfig()
    assert (config.switch_s(0), config.switch_s(64_000_000_000)) == (0, 320)


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ("rollout.workers=1000", "1000 workers would renew their leases 600 times a second"),
        ("rollout.workers=1000 queue.lease_ttl_s=30", ""),
        ("rollout.workers=100", ""),
    ],
)
def test_more_renewals_than_a_queue_answers_beside_its_rows_are_a_warning(
    tmp_path: Path, words: str, warned: str
) -> None:
    recipe = decided(tmp_path, machine(0), *words.split())
    said = [sentence for at, sentence in warnings(recipe, machine(0)) if at[0] == "queue"]
    assert len(said) == bool(warned) and warned in "".join(said)
    assert not warned or said[0].endswith("want 30")


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
def test_the_recipe_of_reasoning_gym_is_good_for_a_real_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tasks are made at each level, if the package is here."""
    pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(tmp_path)  # the checkout may have a run of this recipe
    folder = RECIPES / "reasoning_gym"
    assumed = Written.read(folder / "machine.yaml", ()).as_config(Assumptions)
    loaded = load_recipe(folder / "recipe.yaml", (), machine=AssumedMachine(assumed))
    assert loaded.data.reasoning_gym and loaded.data.reasoning_gym.curriculum
