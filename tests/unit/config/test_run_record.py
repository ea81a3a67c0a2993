"""A run that continues is the run that began: what may change is told, the rest is asked for or refused."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshrl.cli.commands.config import check
from meshrl.config import changes, load_recipe
from meshrl.config.explain import walk
from meshrl.config.loading import anchored, save_recipe
from meshrl.config.recipe import Recipe
from meshrl.config.run_record import RecordedRun, begin, changes_accepted, mark_fed
from meshrl.contract.errors import MeshError, UserError

from ...small_checkpoint import write_tokenizer

TEXT = """
run: {name: my}
model: {path: model}
data:
  train_files: [train.jsonl]
  val_files: [held_out.jsonl]
  train_batch_size: 4
rollout: {n: 4}
reward: {custom_reward_function: {path: reward.py}}
trainer: {total_training_steps: 15}
"""
OWN_STAGE = """
from meshrl.config.stages import Columns, ServiceKind
SERVICE = ServiceKind(columns=Columns(reads=("reward",), writes=("note",)))
"""


def write_model(path: Path, width: int = 8, value: float = 0.5) -> None:
    """A checkpoint as far as its files tell: one tensor, a tokenizer, a chat template."""
    path.mkdir(exist_ok=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [width], "data_offsets": [0, 4 * width]}})
    weights = struct.pack(f"<{width}f", *[value] * width)
    (path / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header.encode() + weights
    )
    (path / "config.json").write_text(json.dumps({"hidden_size": width, "num_hidden_layers": 2}))
    write_tokenizer(path)
    (path / "chat_template.jinja").write_text("{{ messages }}")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "own"]:
        monkeypatch.delitem(sys.modules, name)
    write_model(Path("model"))
    write_model(Path("twin"))
    write_model(Path("other"), value=0.25)
    write_model(Path("wide"), width=16)
    for name, answer in (("train", 1), ("held_out", 2), ("more", 3)):
        Path(f"{name}.jsonl").write_text(json.dumps({"prompt": "?", "answer": answer}) + "\n")
    shutil.copy("train.jsonl", "copy.jsonl")
    Path("reward.py").write_text("def compute_score(*given): return 1.0\n")
    Path("sum.py").write_text("def compute_score(*given): return 2.0\n")
    Path("own").mkdir()
    Path("own", "stage.py").write_text(OWN_STAGE)
    Path("my.yaml").write_text(TEXT)


def recipe(*overrides: str) -> Recipe:
    return load_recipe(Path("my.yaml"), overrides, check=False)


def start(*overrides: str, accept: bool = False) -> list[str]:
    return begin(recipe(*overrides), accept_changes=accept)


def train(steps: int) -> None:
    """As a trainer leaves the directory of a run behind."""
    directory = Path("runs/my")
    mark_fed(directory)
    (directory / "queue").mkdir(exist_ok=True)
    (directory / "checkpoints" / f"step-{steps:08d}-epoch-0001").mkdir(parents=True, exist_ok=True)
    line = json.dumps({"step": steps - 1, "reward/mean": 0.5})
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(line + "\n" + json.dumps({"step": steps, "val/score/mean": 1.0}) + "\n")


def files() -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()}


TOLD = [
    "actor.optim.lr=0.1",
    "actor.optim.lr_warmup_steps=3",
    "actor.clip_ratio=0.3",
    "actor.ppo_mini_batch_size=2",
    "algorithm.adv_estimator=rloo",
    "algorithm.kl_ctrl.kl_coef=0.1",
    "critic.warmup_steps=3",
    "data.max_response_length=64",
    "model.enable_gradient_checkpointing=true",
    "model.lora_alpha=32",
    "model.param_dtype=bfloat16",
    "queue.durability=none",
    "reward.deadline_s=3",
    "reward.workers=2",
    "reward.registry.http_port=null",
    "rollout.temperature=0.5",
    "rollout.top_k=5",
    "rollout.workers=3",
    "rollout.name=echo",
    "rollout.val_kwargs.temperature=1.0",
    "run.trace=1.0",
    "trainer.total_training_steps=20",
    "trainer.total_epochs=3",
    "trainer.save_freq=2",
    "trainer.nproc=2",
    "trainer.logger=[console, wandb]",
    "weights.carrier=shm",
    # The same, at another place.
    "model.path=twin",
    "data.train_files=[copy.jsonl]",
]
BENDS = [
    "run.seed=7",
    "data.seed=7",
    "data.train_files=[more.jsonl]",
    "data.train_files=[train.jsonl, more.jsonl]",
    "data.val_files=[more.jsonl]",
    "data.val_max_samples=1",
    "data.shuffle=false",
    "data.curriculum=length",
    "data.weights={a: 1.0}",
    "data.prompt_key=question",
    "data.answer_key=solution",
    "data.system_prompt=Think.",
    "data.few_shot=[{prompt: a, answer: b}]",
    "data.max_prompt_length=100",
    "data.apply_chat_template_kwargs={enable_thinking: false}",
    "data.reasoning_gym={tasks: {chain_sum: {}}}",
    "model.path=other",
    "model.tokenizer_path=other",
    "reference.path=other",
    "reward.custom_reward_function.path=sum.py",
    "reward.custom_reward_function.name=other",
    "reward.custom_reward_function.reward_kwargs={a: 1}",
    "reward.functions=[{name: math}]",
    "reward.judges=[{kind: http, options: {url: 'http://localhost:1'}}]",
    "reward.registry.name=better",
    "rollout.program=tools",
    "rollout.program_options={a: 1}",
]
REFUSED = [
    "run.name=yours",
    "rollout.n=8",
    "rollout.val_kwargs.n=2",
    "data.train_batch_size=8",
    "algorithm.adv_estimator=remax",
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "actor.use_kl_loss=true",
    "actor.policy_loss.loss_mode=dpo",
    "actor.optim.name=muon",
    "reward.token_rewards=true",
    "stages={note: {kind: own.stage}}",
    "queue.max_staleness=0",
    "queue.max_staleness=inf",
    "queue.group_policy=replace_sibling",
    "queue.stale_policy=drop",
    "queue.sampler=fresh_first",
    "queue.max_attempts=5",
    "queue.lease_ttl_s=30",
    "queue.resident_bytes=1000",
    "queue.store=redis",
    "queue.path=elsewhere",
    "model.lora_rank=8",
    "model.freeze_vision_tower=false",
    "model.path=wide",
    "trainer.resume_mode=disable",
    "trainer.default_local_dir=elsewhere",
]


@pytest.mark.parametrize("override", TOLD)
def test_what_may_change_is_told_in_one_line_and_goes_on(override: str) -> None:
    start()
    train(3)
    (line,) = start(override)
    key = override.partition("=")[0]
    assert line.startswith(f"run my: {key}: ") and "the run began with" in line
    assert start() == [], "and back"
    assert len(start(override, accept=True)) == 1


@pytest.mark.parametrize("override", BENDS)
def test_what_bends_a_run_wants_another_name_or_to_be_accepted(override: str) -> None:
    start()
    train(3)
    before = files()
    with pytest.raises(UserError) as refused:
        start(override)
    key = override.partition("=")[0]
    lines = str(refused.value).splitlines()
    assert lines and all(line.startswith(key) for line in lines)
    assert all("choose another run.name, or give --accept-changes" in line for line in lines)
    assert files() == before, "a refused start leaves no trace"
    told = start(override, accept=True)
    assert told and all(line.startswith(f"run my: {key}") for line in told)
    assert changes_accepted(Path("runs/my"))
    assert start(override) == told, "what was accepted once continues"
    train(5)
    assert start(override) == told
    with pytest.raises(UserError, match="--accept-changes"):
        start()
    start(f"{override}", f"run.dir={Path('runs/my').absolute()}")


@pytest.mark.parametrize("override", REFUSED)
def test_what_the_queue_or_the_checkpoints_hold_is_refused_with_both_values(override: str) -> None:
    start()
    train(3)
    before = files()
    moved = (f"run.dir={Path('runs/my').absolute()}",) if "run.name" in override else ()
    for accept in (False, True):
        with pytest.raises(UserError) as refused:
            start(override, *moved, accept=accept)
        (line,) = (each for each in str(refused.value).splitlines() if "remove" in each)
        assert line.startswith(override.partition("=")[0])
        assert "choose another run.name, or remove" in line
    assert files() == before
    assert start() == []


def test_keys_that_only_together_ask_the_queue_for_another_run_are_all_named() -> None:
    start("algorithm.filter_groups.enable=false")
    train(3)
    assert len(start("algorithm.filter_groups.oversample=2.0")) == 1
    with pytest.raises(UserError) as refused:
        start("algorithm.filter_groups={enable: true, oversample: 2.0}")
    first, second = str(refused.value).splitlines()
    assert first.startswith("algorithm.filter_groups.enable: true, and the run began with false")
    assert second.startswith("algorithm.filter_groups.oversample: 2.0, and the run began with 1.0")


def test_each_key_that_was_changed_has_its_line() -> None:
    start()
    train(3)
    with pytest.raises(UserError) as refused:
        start("rollout.n=8", "queue.max_staleness=0", "data.seed=7", "actor.optim.lr=0.1")
    lines = [line.partition(", which")[0] for line in str(refused.value).splitlines()]
    assert lines[:2] == [
        "rollout.n: 8, and the run began with 4",
        "queue.max_staleness: 0, and the run began with 1",
    ]
    assert lines[2].startswith("data.seed: 7, and the run began with 0: run my would be another")
    assert len(lines) == 3


def edited(name: str, text: str) -> Callable[[], None]:
    return lambda: Path(name).write_text(text) and None


EDITS: Sequence[tuple[str, Callable[[], None]]] = [
    ("data.train_files: ", edited("train.jsonl", '{"prompt": "?", "answer": 7}\n')),
    ("data.val_files: ", edited("held_out.jsonl", '{"prompt": "?", "answer": 7}\n')),
    ("model.path: ", edited("model/chat_template.jinja", "{{ 1 }}")),
    ("model.path: ", lambda: write_tokenizer(Path("model"), ["<eos>"])),
    ("model.path: ", lambda: write_model(Path("model"), value=0.25)),
    ("reward.custom_reward_function.path: ", edited("reward.py", "def compute_score(*a): ...\n")),
]


@pytest.mark.parametrize(("key", "edit"), EDITS)
def test_a_file_that_was_edited_in_place_is_noticed(key: str, edit: Callable[[], None]) -> None:
    start()
    train(3)
    edit()
    with pytest.raises(UserError) as refused:
        start()
    (line,) = str(refused.value).splitlines()
    assert line.startswith(key) and "is not as it was when the run began" in line
    assert "--accept-changes" in line
    (told,) = start(accept=True)
    assert told.startswith(f"run my: {key}")


def test_a_file_that_was_only_touched_or_written_again_is_the_same(tmp_path: Path) -> None:
    start()
    train(3)
    for path in (Path("train.jsonl"), Path("model/model.safetensors"), Path("reward.py")):
        os.utime(path, ns=(1, 1))
    assert start() == []


def test_of_large_weights_the_beginning_the_end_and_blocks_between_are_compared() -> None:
    weights = Path("model/model.safetensors")
    os.truncate(weights, (1 << 30) + 12_345)
    start()
    train(3)
    for place in (20, 600 << 20, (1 << 30) + 12_344):
        with weights.open("r+b") as file:
            file.seek(place)
            block = file.read(1 << 23)
            file.seek(place)
            file.write(bytes(255 - byte for byte in block))
        with pytest.raises(UserError, match=r"model\.safetensors is not as it was"):
            start()
        with weights.open("r+b") as file:
            file.seek(place)
            file.write(block)
        assert start() == []


def test_every_key_that_is_sorted_is_a_key_of_a_recipe() -> None:
    known = {key.dotted for key in walk(Recipe)}
    sorted_keys = (
        *changes.BENDS,
        *changes.BENDS_NOT,
        *changes.ADAPTER,
        *changes.ELSEWHERE,
        *changes.HELD_BY_QUEUE,
        *changes.HELD_BY_CHECKPOINTS,
    )
    assert not [key for key in sorted_keys if key not in known]
    assert len(set(sorted_keys)) == len(sorted_keys)
    assert all(any(k.startswith(f"{b}.") for b in changes.BENDS) for k in changes.BENDS_NOT)


def test_files_that_a_program_a_judge_or_a_module_of_ones_own_reads_count_too() -> None:
    Path("agent.py").write_text("def solve(): ...\n")
    Path("own", "program.py").write_text("USES_GATEWAY = True\n")
    words = (
        "rollout.program=own.program",
        "rollout.program_options={function: 'agent.py:solve', tools: [sum.py]}",
        "reward.functions=[{name: table, path: sum.py, kwargs: {table: table.json}}]",
    )
    Path("table.json").write_text("{}")
    start(*words)
    train(3)
    for name, key in (
        ("agent.py", "rollout.program_options"),
        ("own/program.py", "rollout.program"),
        ("table.json", "reward.functions.0.kwargs"),
    ):
        before = Path(name).read_text()
        Path(name).write_text("None\n")
        with pytest.raises(UserError, match=rf"^{key}: .*{name} is not as it was"):
            start(*words)
        Path(name).write_text(before)
    assert start(*words) == []


def test_with_an_adapter_neither_its_shape_nor_its_base_can_change() -> None:
    lora = "model.lora_rank=4"
    start(lora)
    train(3)
    for other in ("model.lora_rank=8", "model.lora_rank=0"):
        with pytest.raises(UserError, match=r"model\.lora_rank: \d, and the run began with 4"):
            start(other, accept=True)
    for other in ("lora_alpha=3", "target_modules=[q_proj]", "use_dora=true", "use_rslora=true"):
        with pytest.raises(UserError, match=rf"model\.{other.partition('=')[0]}: "):
            start(lora, f"model.{other}", accept=True)
    with pytest.raises(UserError, match="is not of the base model whose adapter"):
        start(lora, "model.path=other", accept=True)
    assert start(lora) == []


def test_data_whose_own_answers_are_learned_from_cannot_be_others() -> None:
    words = ("algorithm.adv_estimator=data_answer", "rollout.n=1")
    start(*words)
    train(3)
    Path("train.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"train\.jsonl .*rows in the queue wait for: keep it"):
        start(*words, accept=True)


def test_another_shape_is_named() -> None:
    start("critic.path=twin")
    train(3)
    with pytest.raises(UserError, match=r"another shape .* \(hidden_size 16, not 8\)"):
        start("model.path=wide", "critic.path=twin", accept=True)
    with pytest.raises(UserError, match=r"critic\.path: the model has another shape"):
        start("critic.path=wide", accept=True)
    start("critic.path=other", accept=True)


def test_before_the_first_step_a_reward_and_the_model_may_change_until_prompts_are_fed() -> None:
    words = ("model.path=wide", "data.seed=3", "run.seed=2", "model.lora_rank=2")
    start()
    assert start(*words) == [], "it begins with what is started now"
    assert start(*words) == []
    start("rollout.n=2", *words)
    start(*words)
    Path("runs/my/queue").mkdir()  # a service has opened the run
    with pytest.raises(UserError, match=r"rollout\.n"):
        start("rollout.n=2", *words)
    mark_fed(Path("runs/my"))
    with pytest.raises(UserError, match=r"data\.seed: .* remove .*runs/my \(nothing is trained"):
        start("model.path=wide", "data.seed=4", "run.seed=2", "model.lora_rank=2")
    Path("reward.py").write_text("def compute_score(*given): return 0.5\n")
    assert start(*words) == [], "a reward that failed is mended and tried again"


def test_a_start_that_was_killed_before_it_trained_leaves_the_run_of_before() -> None:
    start()
    train(3)
    start("data.seed=7", accept=True)
    assert start() == [], "nothing was trained with the other seed"
    start("data.seed=7", accept=True)
    train(4)
    with pytest.raises(UserError, match=r"data\.seed: 0"):
        start()
    assert len(start("data.seed=7")) == 1


def test_a_directory_without_a_record_began_with_its_recipe() -> None:
    directory = Path("runs/my")
    directory.mkdir(parents=True)
    save_recipe(anchored(recipe()), directory / "recipe.yaml")
    train(3)
    assert not (directory / "run.json").exists()
    for word in ("rollout.n=8", "data.seed=7", "data.train_files=[more.jsonl]"):
        with pytest.raises(UserError, match=word.partition("=")[0]):
            start(word)
        assert not (directory / "run.json").exists()
    assert len(start("actor.optim.lr=0.1")) == 1
    record = RecordedRun.load(directory)
    assert record is not None and record.states[0].recipe == anchored(recipe())
    Path("train.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"train\.jsonl is not as it was"):
        start()


def test_a_directory_of_0_1_goes_on_and_refuses_what_it_cannot_be(tmp_path: Path) -> None:
    shutil.unpack_archive(Path(__file__).parents[2] / "fixtures" / "run-0.1.tar.gz", tmp_path)
    old = tmp_path / "old-run"
    os.chdir(old)
    started = load_recipe(Path("recipe.yaml"), check=False)
    begin(started, accept_changes=False)
    assert begin(started, accept_changes=False) == []
    for word in ("rollout.n=3", "run.seed=5", "model.lora_rank=2"):
        with pytest.raises(UserError, match=word.partition("=")[0]):
            begin(load_recipe(Path("recipe.yaml"), [word], check=False), accept_changes=False)


def test_a_directory_that_was_moved_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    train(3)
    Path("elsewhere").mkdir()
    for name in ("model", "train.jsonl", "held_out.jsonl", "reward.py", "my.yaml", "runs"):
        Path(name).rename(Path("elsewhere", name))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert {line.split(": ")[1] for line in start()} == {
        "model.path",
        "data.train_files",
        "data.val_files",
        "reward.custom_reward_function.path",
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"states": []}',
        '{"states": [{}]}',
        '{"states": [], "fed": false, "changed": false}',
        '{"states": [{"content": []}]}',
    ],
)
def test_a_damaged_record_is_said_in_one_line(text: str) -> None:
    start()
    Path("runs/my/run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json cannot be read") as refused:
        start()
    assert len(str(refused.value).splitlines()) == 1


def test_a_record_of_another_version_with_a_key_that_is_gone_is_read() -> None:
    start()
    stored = json.loads(Path("runs/my/run.json").read_text())
    stored["states"][0]["recipe"]["queue"]["forgotten"] = 1
    stored["states"][0]["recipe"]["gone"] = {"a": 1}
    Path("runs/my/run.json").write_text(json.dumps(stored))
    train(3)
    assert start() == []


def test_a_run_with_a_store_of_pictures_is_refused_unchanged() -> None:
    start()
    train(2)
    record = Path("runs/my/run.json")
    stored = json.loads(record.read_text())
    stored["states"][0]["recipe"]["data"]["media_store"] = "s3://bucket/pictures"
    record.write_text(json.dumps(stored))
    before = files()
    with pytest.raises(UserError) as refused:
        start()
    (line,) = refused.value.message.splitlines()
    assert "run my keeps pictures" in line and "continue with commit 9121209e" in line
    assert files() == before


def test_who_only_compares_writes_nothing_and_reads_its_own_files_only() -> None:
    assert begin(recipe(), accept_changes=False, writes=False) == []
    assert not Path("runs").exists()
    start()
    train(3)
    before = files()
    Path("train.jsonl").write_text("{}\n")
    begin(recipe(), accept_changes=False, writes=False, sections=("reward",))
    with pytest.raises(UserError, match="train_files"):
        begin(recipe(), accept_changes=False, writes=False, sections=("data",))
    with pytest.raises(UserError, match=r"rollout\.n"):
        begin(recipe("rollout.n=2"), accept_changes=False, writes=False, sections=())
    assert files() == before


def test_config_check_refuses_what_would_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshrl.cli.commands.config.load_recipe", loaded_unchecked)
    start()
    train(3)
    before = files()
    done = CliRunner().invoke(check, ["my.yaml", "actor.optim.lr=0.1"])
    assert done.exit_code == 0
    assert "run my: actor.optim.lr: 0.1, and the run began with 1.0e-06" in done.output
    for word in ("rollout.n=8", "data.seed=7"):
        refused = CliRunner().invoke(check, ["my.yaml", word])
        assert isinstance(refused.exception, MeshError)
        assert str(refused.exception).startswith(word.partition("=")[0])
    accepted = CliRunner().invoke(check, ["my.yaml", "data.seed=7", "--accept-changes"])
    assert accepted.exit_code == 0 and "data.seed: 7" in accepted.output
    assert files() == before


def loaded_unchecked(path: Path, overrides: Sequence[str], **_: object) -> Recipe:
    """The model here is none that a check would pass."""
    return load_recipe(path, overrides, check=False)
