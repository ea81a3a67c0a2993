"""Recipes with a vision-language model: every part must read images as it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshrl.config import load_recipe
from meshrl.config.checks import cross_checks
from meshrl.config.loading import Written
from meshrl.config.machine import AssumedMachine, Assumptions
from meshrl.contract.errors import ConfigError

from ...small_checkpoint import write_tokenizer, write_weights

ROOT = Path(__file__).parents[3]
READS = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 1024, "longest_edge": 65_536}}


def checkpoint(path: Path, **preprocessor: Any) -> Path:
    """Write the files of a model that `config check` reads; without `preprocessor`, a text model."""
    path.mkdir()
    write_weights(path / "model.safetensors")
    write_tokenizer(path)
    config: dict[str, Any] = {"model_type": "qwen3_vl", "num_attention_heads": 4}
    if preprocessor:
        config |= {"image_token_id": 7, "vision_config": {"spatial_merge_size": 2}}
        (path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    (path / "config.json").write_text(json.dumps(config))
    return path


def problems(model: Path, *more: str) -> list[str]:
    """Problems of a recipe with pictures."""
    asked = [f"model.path={model}", "rollout.name=vllm", *more]
    recipe = load_recipe(ROOT / "recipes/vision/recipe.yaml", asked, check=False)
    return [text for _, text in cross_checks(recipe) if "picture" in text or "vision-" in text]


KL = ("actor.use_kl_loss=true",)
CRITIC = ("algorithm.adv_estimator=gae",)


@pytest.mark.parametrize("more", [(), KL, CRITIC, ("algorithm.adv_estimator=prime",)])
def test_a_reference_a_critic_and_a_reward_model_may_stand_beside_a_model_that_reads_pictures(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    assert problems(checkpoint(tmp_path / "model", **READS), *more) == []


@pytest.mark.parametrize(
    ("more", "key"), [(KL, "reference.path"), (CRITIC, "critic.path")], ids=["reference", "critic"]
)
def test_a_model_beside_it_that_makes_other_tokens_of_a_picture_is_one_line(
    tmp_path: Path, more: tuple[str, ...], key: str
) -> None:
    model = checkpoint(tmp_path / "model", **READS)
    text, other = checkpoint(tmp_path / "text"), checkpoint(tmp_path / "x", **READS | {"size": 2})
    (problem,) = problems(model, *more, f"{key}={text}")
    assert problem.startswith(f"{key}: {text} and model.path must make the same tokens")
    assert problem.endswith("and image_token_id is None there, 7 here")
    (problem,) = problems(model, *more, f"{key}={other}")
    assert "and size is 2 there" in problem
    assert problems(model, *more, f"{key}={model}") == []


@pytest.mark.parametrize("dimension", ["tensor", "expert"])
def test_tensor_and_expert_ranks_are_refused_in_one_line(tmp_path: Path, dimension: str) -> None:
    model = checkpoint(tmp_path / "model", **READS)
    key = f"trainer.parallel.{dimension}"
    found = problems(model, "trainer.nproc=2", f"{key}=2")
    assert found == [f"{key}: a vision-language model is not sharded so; want 1"]


def test_qwen2_5_vl_with_other_patches_is_not_given_to_sglang(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", **READS)
    config = {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 16}}
    (model / "config.json").write_text(json.dumps(config))
    (found,) = problems(model, "rollout.name=sglang", "rollout.engine={url: 'http://a'}")
    assert found.startswith("rollout.name: SGLang ends at a picture for ")
    assert found.endswith("is 16, not 14; want rollout.name=vllm")
    (model / "config.json").write_text(
        json.dumps({"model_type": "qwen2_5_vl", "vision_config": {}})
    )
    assert problems(model, "rollout.name=sglang", "rollout.engine={url: 'http://a'}") == []


def test_tiles_are_read_by_vllm_alone(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", image_processor_type="SmolVLMImageProcessorFast")
    assert problems(model) == []
    (problem,) = problems(model, "rollout.name=sglang")
    assert problem.endswith(
        "makes tiles of pictures (SmolVLMImageProcessor), which SGLang is not given; want rollout.name=vllm"
    )


def test_the_ranks_of_a_reference_are_not_sent_pictures(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", **READS)
    assert problems(model, "reference.nproc=2") == []
    (problem,) = problems(model, *KL, "reference.nproc=2")
    assert problem.startswith("reference.nproc: ") and problem.endswith("get no images; want 1")


FOLDER = Path(__file__).parents[3] / "recipes" / "geo3k"
AGENT = "rollout.program_options={function: recipes/vision/game.py:play"


def check(*overrides: str, **changes: Any) -> None:
    assumed = Written.read(FOLDER / "machine.yaml", ()).as_config(Assumptions)
    machine = AssumedMachine(assumed.model_copy(update=changes))
    load_recipe(FOLDER / "recipe.yaml", overrides, machine=machine)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ("rollout.name=torch",),
            "'images' cannot be used (want a vision-language model, and an engine for it)",
        ),
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
        (("trainer.parallel.tensor=2",), "trainer.parallel.tensor: a vision-language model"),
        (("data.image_key=pictures",), "'images' cannot be used"),
    ],
)
def test_what_would_lose_the_pictures_is_refused(overrides: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(*overrides)
    assert problem in str(caught.value)


def test_the_text_part_of_a_model_that_reads_pictures_is_sampled_by_the_embedded_engine(
    tmp_path: Path,
) -> None:
    model = checkpoint(tmp_path / "model", **READS)
    about = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    text = {"rope_parameters": {"rope_type": "default"}, "max_position_embeddings": 64}
    (model / "config.json").write_text(
        json.dumps({**about, "vision_config": {}, "text_config": text})
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "2", "answer": "2"}) + "\n")
    asked = (f"data.train_files=[{rows}]", f"data.val_files=[{rows}]", "rollout.name=torch")
    assert problems(model, *asked, "rollout.engine={}", "rollout.program=verifiers") == []
    rows.write_text(json.dumps({"prompt": "<image> 2", "answer": "2", "images": ["a.png"]}) + "\n")
    found = problems(model, *asked, "rollout.engine={}")
    assert len(found) == 2 and all("'images' cannot be used" in each for each in found)


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
