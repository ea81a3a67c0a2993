"""A recipe is read as it was meant, and every mistake in it is one line that says what would be right."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshrl.cli.demo.tiny_model import write_tiny_model
from meshrl.common.config import Config
from meshrl.config import Recipe, eval_spec, load_recipe, needs_reference, train_spec
from meshrl.config.checks import cross_checks
from meshrl.config.dropped_keys import DROPPED_KEYS
from meshrl.config.explain import walk
from meshrl.config.loading import Written, save_recipe
from meshrl.config.machine import AssumedMachine, Assumptions, ThisMachine
from meshrl.contract.errors import ConfigError
from meshrl.contract.types import PARTS, OnUpdate
from meshrl.trainer.offline.config import DpoConfig, RewardModelConfig, SftConfig
from meshrl.transferqueue.model.specs import Quota, check_spec

from ...frozen_queue import FROZEN
from ...pairs import fits, pairs

MINIMAL = "model: {path: model}\n"


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str, *overrides: str) -> Recipe:
    Path("my.yaml").write_text(text)
    return load_recipe(Path("my.yaml"), overrides, check=False)


def said(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value).splitlines()


def test_what_is_not_said_has_its_default() -> None:
    recipe = load(MINIMAL)
    assert recipe.rollout.n == 8
    assert recipe.run.name == "my"
    assert recipe.run.path == Path("runs/my")
    assert recipe.queue_path == Path("runs/my/queue")


def test_a_server_of_callers_models_needs_no_data_and_takes_adapters_without_a_rank(
    tmp_path: Path,
) -> None:
    write_tiny_model(tmp_path / "model")
    path = tmp_path / "my.yaml"
    path.write_text(MINIMAL)
    rollout = ("rollout.name=vllm", "rollout.engine={url: http://h:1, max_lora_rank: 8}")
    with pytest.raises(ConfigError, match="train_files is empty"):
        load_recipe(path, rollout)
    assert load_recipe(path, ("tinker={}", *rollout)).tinker is not None
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_recipe(path, ("tinker={}", "model.path=none"))
    with pytest.raises(ConfigError, match="nnodes make 2 ranks"):
        load_recipe(path, ("tinker={}", "trainer.nproc=2"))


ENVIRONMENT = (
    "verifiers",
    "{env: {taskset: {id: sums}}, session: {branch: each, client_sampling: true}}",
)
IN_CONTAINERS = "container_agent", "{command: [agent], client_sampling: true}"


@pytest.mark.parametrize(("program", "options"), [ENVIRONMENT, IN_CONTAINERS])
def test_options_of_sessions_are_read_wherever_a_program_has_them(
    program: str, options: str
) -> None:
    recipe = load(
        MINIMAL,
        f"rollout.program={program}",
        f"rollout.program_options={options}",
        "queue.max_staleness=0",
    )
    said = [text for _, text in cross_checks(recipe, ThisMachine())]
    assert any("clients choose other distributions than the trainer's" in text for text in said)
    (rollout,) = [stage for stage in train_spec(recipe).stages if stage.name == "rollout"]
    assert (PARTS in rollout.writes) == ("branch: each" in options)


def test_an_override_wins_over_the_file_and_the_last_override_over_all() -> None:
    text = MINIMAL + "rollout: {n: 4}\n"
    assert load(text, "rollout.n=16", "rollout.n=32").rollout.n == 32


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_hydras_prefixes_mean_the_same(prefix: str) -> None:
    assert load(MINIMAL, f"{prefix}actor.optim.lr=3e-4").actor.optim.lr == 3e-4


def test_overrides_are_yaml() -> None:
    recipe = load(
        MINIMAL,
        "data.train_files=[a.parquet, b.jsonl]",
        "rollout.deterministic=true",
        "rollout.stop=['</answer>']",
        "trainer.total_training_steps=",
        "queue.max_staleness=inf",
        "rollout.on_update=drain",
        "reward.functions=[{name: gsm8k}, {name: length, weight: 0.1}]",
        "reward.functions.1.weight=0.5",
    )
    assert recipe.data.train_files == [Path("a.parquet"), Path("b.jsonl")]
    assert recipe.rollout.deterministic is True
    assert recipe.rollout.stop == ["</answer>"]
    assert recipe.trainer.total_training_steps is None
    assert math.isinf(train_spec(recipe).max_staleness)
    assert recipe.rollout.on_update is OnUpdate.DRAIN
    assert [function.weight for function in recipe.reward.functions] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("written", "read"),
    [("1e-6", 1e-6), ("0.5_5.0", "0.5_5.0"), ("0.5_5", "0.5_5"), ("2", 2.0)],
)
def test_scalars_are_read_as_yaml_1_2_does(written: str, read: float | str) -> None:
    correction = f"rollout_correction: {{rollout_is_threshold: {written}}}"
    recipe = load(MINIMAL + f"algorithm: {{{correction}}}\n")
    assert recipe.algorithm.rollout_correction.rollout_is_threshold == read


def test_a_saved_recipe_is_read_back_as_it_was(tmp_path: Path) -> None:
    recipe = load(MINIMAL, "queue.max_staleness=inf", "actor.clip_ratio_high=0.28")
    save_recipe(recipe, tmp_path / "saved.yaml")
    assert load_recipe(tmp_path / "saved.yaml", check=False) == recipe


@pytest.mark.parametrize(
    "gone", ["shared_memory_bytes: 4", "shared_bytes: 0", "local_socket: false"]
)
def test_a_key_that_is_gone_is_dropped_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gone: str
) -> None:
    recipe = load(MINIMAL + f"queue:\n  {gone}\n  max_attempts: 5\n")
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"my.yaml:3: queue.{gone.split(':')[0]} is no longer a key and is ignored: "
        "payload always travels over gRPC"
    )
    assert recipe.queue.max_attempts == 5
    save_recipe(recipe, tmp_path / "saved.yaml")
    load_recipe(tmp_path / "saved.yaml", check=False)
    assert not capsys.readouterr().err


def test_dropped_keys_that_say_what_holds_are_told_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load(MINIMAL + "queue: {shards: 1, quota: {runs: 1000}}\nreward: {slots: 256}\n")
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "my.yaml:2: queue.quota and 2 others are no longer keys; this changes nothing"
    load(MINIMAL + "queue: {quota: {runs: 5}}\nreward: {slots: 256}\n")
    changed, same = capsys.readouterr().err.splitlines()
    assert changed.startswith(
        "my.yaml:2: queue.quota is no longer a key and is ignored: 1,000 runs"
    )
    assert same == "my.yaml:3: reward.slots is no longer a key; this changes nothing"


def test_a_recipe_with_a_store_of_pictures_loads_with_a_line_for_each_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load(MINIMAL, "data.media_store=s3://bucket/pictures", "data.media_inline_bytes=1")
    said = capsys.readouterr().err
    for key in ("media_store", "media_inline_bytes"):
        assert f"data.{key} is no longer a key and is ignored: pictures" in said
    assert said.count("\n") == 2 and "32 MiB at most" in said


@pytest.mark.parametrize(
    ("section", "key", "old", "new"),
    [("queue", "durability", "everysec", "always"), ("weights", "carrier", "object", "disk")],
)
def test_a_value_that_is_gone_is_replaced_with_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    section: str,
    key: str,
    old: str,
    new: str,
) -> None:
    recipe = load(MINIMAL + f"{section}: {{{key}: {old}}}\n")
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"my.yaml:2: {section}.{key}={old} is no longer a value: {new} is used"
    assert getattr(getattr(recipe, section), key) == new
    save_recipe(recipe, tmp_path / "saved.yaml")
    load_recipe(tmp_path / "saved.yaml", check=False)
    assert not capsys.readouterr().err


def test_a_key_that_is_gone_is_dropped_from_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load(MINIMAL, "queue.shared_memory_bytes=4")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "command line: queue.shared_memory_bytes=4: queue.shared_memory_bytes is"
    )


@pytest.mark.parametrize(("text", "line"), pairs(Path(__file__).with_name("wrong_keys.txt")))
def test_a_mistake_in_the_file_is_one_line(text: list[str], line: str) -> None:
    (only,) = said(MINIMAL + "\n".join(text))
    assert fits(only, line), only


def test_several_mistakes_are_reported_at_once_in_the_order_of_the_file() -> None:
    lines = said("model: {}\nrollout: {m: 2}\ntrainer:\n  nproc: x\n  device: tpu\n")
    assert [line.split(": ")[0] for line in lines] == [
        "my.yaml:1",
        "my.yaml:2",
        "my.yaml:4",
        "my.yaml:5",
    ]
    assert lines[0].startswith("my.yaml:1: model.path is missing; want a path")


@pytest.mark.parametrize("text", ["just words", "[1, 2]", "3"])
def test_a_file_without_sections_is_refused(text: str) -> None:
    (line,) = said(text)
    assert line.startswith("my.yaml: want sections (run, model, data, ...), got ")


def test_a_recipe_that_is_not_there_is_named_with_those_that_are() -> None:
    Path("other.yaml").write_text(MINIMAL)
    with pytest.raises(ConfigError, match=r"^mine.yaml: no such recipe \(there are: other.yaml\)$"):
        load_recipe(Path("mine.yaml"))


def test_a_directory_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_recipe(tmp_path)


def test_an_algorithm_with_a_kl_term_brings_the_reference_stage() -> None:
    plain = load(MINIMAL)
    assert not needs_reference(plain)
    assert [stage.name for stage in train_spec(plain).stages] == ["rollout", "reward"]
    for override in ("actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true"):
        recipe = load(MINIMAL, override)
        assert needs_reference(recipe)
        assert [stage.name for stage in train_spec(recipe).stages][-1] == "reference"


FP8 = "rollout={name: vllm, engine: {quantization: fp8}}"


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ([FP8], "token"),
        ([FP8, "algorithm.rollout_correction.rollout_is_threshold=3"], "token"),
        ([FP8, "algorithm.rollout_correction.rollout_is=sequence"], "sequence"),
        ([FP8, "algorithm.rollout_correction.rollout_is=null"], None),
        ([FP8, "algorithm.rollout_correction.bypass_mode=true"], None),
        (["rollout.name=vllm"], None),
    ],
)
def test_engines_of_fewer_bits_are_corrected_for_unless_the_recipe_says_otherwise(
    overrides: list[str], kept: str | None
) -> None:
    assert load(MINIMAL, *overrides).algorithm.rollout_correction.rollout_is == kept


def test_rows_keep_their_experts_in_the_training_run_only() -> None:
    recipe = load(MINIMAL + "data: {val_files: [held_out.jsonl]}\n", "rollout.routing_replay=true")
    trained, evaluated = train_spec(recipe).stages[0], eval_spec(recipe).stages[0]
    assert "routed_experts" in trained.writes
    assert "routed_experts" not in evaluated.writes
    assert "routed_experts" not in train_spec(load(MINIMAL)).stages[0].writes


def test_routers_of_compiled_layers_cannot_be_told_their_experts() -> None:
    recipe = load(MINIMAL, "rollout.routing_replay=true", "model.use_torch_compile=true")
    said = [text for _, text in cross_checks(recipe, ThisMachine())]
    assert any("use_torch_compile: routers of compiled layers ignore" in t for t in said)


def test_evaluation_is_a_run_of_its_own_bound_to_no_version() -> None:
    spec = eval_spec(load(MINIMAL, "rollout.val_kwargs.n=4"))
    assert (spec.run, spec.group_size, spec.gated, spec.priority) == ("my.eval", 4, False, 1)
    assert math.isinf(spec.max_staleness)


@pytest.mark.parametrize("answers", [1, 3, 4, 8, 64, 1024])
def test_the_queue_has_room_for_an_evaluation_with_any_number_of_answers(answers: int) -> None:
    recipe = load(MINIMAL, f"rollout.val_kwargs.n={answers}")
    spec = eval_spec(recipe)
    check_spec(spec, Quota())
    assert spec.admission_groups * answers > 1_000_000


def test_every_key_can_be_explained_in_words() -> None:
    for key in walk(Recipe):
        assert "typing." not in key.type_text and "<class" not in key.type_text, key.dotted
        assert key.default_text, key.dotted


@pytest.mark.parametrize(
    ("config", "vocabulary"),
    [
        ({"vocab_size": 23}, 23),
        ({"vocab_size": 5, "text_config": {"vocab_size": 23}}, 23),
        ({"vocab_size": "many"}, 0),
        ({"vocab_size": -1}, 0),
        ({}, 0),
        (None, 0),
    ],
)
def test_a_run_knows_the_vocabulary_where_the_checkpoint_says_it(
    tmp_path: Path, config: dict[str, object] | None, vocabulary: int
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    recipe = load(MINIMAL, f"model.path={tmp_path}")
    assert train_spec(recipe).vocabulary == eval_spec(recipe).vocabulary == vocabulary


ROOT = Path(__file__).parents[3]
DROPPED: Collection[str] = {".".join(map(str, key)) for key in DROPPED_KEYS}
"""Keys of then that no recipe has now, with all below them; `N` stands for a place in a list."""
OFFLINE: Mapping[str, type[Config]] = {
    "recipes/gsm8k/sft.yaml": SftConfig,
    "recipes/preferences/dpo.yaml": DpoConfig,
    "recipes/preferences/reward.yaml": RewardModelConfig,
    "recipes/vision/sft.yaml": SftConfig,
}
"""Recipes of commands beside `up`."""
DEFAULTS = "defaults"
RECIPES: Mapping[str, Mapping[str, Any]] = yaml.safe_load((FROZEN / "recipes.yaml").read_text())
"""Values by dotted key, by path of the recipe: all of one that names only a model; of the others, differences."""


def values(path: Path, kind: type[Config] | None = None) -> dict[str, Any]:
    """Output of `meshrl config show` for a recipe, by dotted key, on a machine without a GPU."""
    if kind is not None:
        return dict(flat(Written.read(path, ()).as_config(kind).model_dump(mode="json")))
    machine = AssumedMachine(Assumptions(gpus=0))
    recipe = load_recipe(path, check=False, hub=False, machine=machine)
    return dict(flat(recipe.model_dump(mode="json")))


def flat(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves, by dotted key. What is empty is a leaf, and so is a list of no sections."""
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        value = dict(enumerate(value))
    if not (isinstance(value, dict) and value):
        yield at, value
        return
    for name, below in value.items():
        yield from flat(below, f"{at}.{name}" if at else str(name))


def expected(path: str) -> dict[str, Any]:
    """The frozen result of `values`: the recipe's own values over the defaults."""
    found = dict(RECIPES[path])
    inner = {key[: end.start()] for key in found for end in re.finditer(r"\.", key)}
    for key, value in ({} if path in OFFLINE else RECIPES[DEFAULTS]).items():
        replaced = key in inner or any(f"{key}.".startswith(f"{own}.") for own in found)
        if not replaced:
            found[key] = value
    return {key: value for key, value in found.items() if not dropped(key)}


def dropped(key: str) -> bool:
    """Whether the key, or one above it, is named in DROPPED."""
    general = re.sub(r"\.\d+(?=\.|$)", ".N", key)
    return any(f"{general}.".startswith(f"{name}.") for name in DROPPED)


@pytest.mark.parametrize("path", sorted(RECIPES.keys() - {DEFAULTS}))
def test_a_shipped_recipe_means_what_it_meant(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    then, now = expected(path), values(Path(path), OFFLINE.get(path))
    gone = sorted(then.keys() - now.keys())
    assert not gone, "keys that went: name them in DROPPED"
    assert {key: now[key] for key in then} == then


KEYS = Path(__file__).parents[2] / "fixtures" / "recipe_keys.txt"
"""Every key that a recipe has or had, one a line, sorted."""


def test_the_keys_of_a_recipe_are_the_frozen_ones(tmp_path: Path) -> None:
    frozen = KEYS.read_text().splitlines()
    present = {key.dotted for key in walk(Recipe)}
    added = sorted(present - set(frozen))
    assert not added, f"new keys of a recipe: add them to {KEYS}, sorted: {added}"
    assert frozen == sorted(set(frozen)), f"{KEYS} is not sorted"
    path = tmp_path / "old.yaml"
    path.write_text("model: {path: model}\ndata: {reasoning_gym: {tasks: {gcd: {}}, levels: 2}}\n")
    for key in frozen:
        if key in present:
            continue
        # A key that is refused here comes back, or is added to DROPPED_KEYS in meshrl/config/dropped_keys.py.
        load_recipe(path, [f"{key}=null"], check=False)
