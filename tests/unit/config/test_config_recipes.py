"""A recipe is read as it was meant, and every mistake in it is one line that says what would be right."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from meshrl.config import Recipe, eval_spec, load_recipe, needs_reference, train_spec
from meshrl.config.checks import cross_checks
from meshrl.config.explain import walk
from meshrl.config.loading import save_recipe
from meshrl.config.machine import ThisMachine
from meshrl.contract.errors import ConfigError
from meshrl.contract.types import OnUpdate
from meshrl.transferqueue.model.specs import Quota, check_spec

from ...small_checkpoint import write_tokenizer, write_weights

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
    assert line == "my.yaml:2: queue.quota and 2 others are no longer keys; what they say holds"
    load(MINIMAL + "queue: {quota: {runs: 5}}\nreward: {slots: 256}\n")
    changed, same = capsys.readouterr().err.splitlines()
    assert changed.startswith(
        "my.yaml:2: queue.quota is no longer a key and is ignored: 1,000 runs"
    )
    assert same == "my.yaml:3: reward.slots is no longer a key; what it says holds"


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


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "trainer: {nprox: 2}",
            "my.yaml:2: no such key 'trainer.nprox'; did you mean 'trainer.nproc'?",
        ),
        ("actor: {lr: 1}", "my.yaml:2: no such key 'actor.lr'; did you mean 'actor.optim.lr'?"),
        ("modle: {}", "my.yaml:2: no such key 'modle'; did you mean 'model'?"),
        (
            "actor_rollout_ref:\n  rollout:\n    n: 4",
            "my.yaml:4: no such key 'actor_rollout_ref.rollout.n'; did you mean 'rollout.n'?",
        ),
        (
            "reward:\n  functions:\n  - name: math\n    wieght: 2",
            "my.yaml:5: no such key 'reward.functions.0.wieght'; "
            "did you mean 'reward.functions.0.weight'?",
        ),
        (
            "zzz: 1",
            "my.yaml:2: no such key 'zzz'; known here: run, model, data, algorithm, actor, "
            "critic, reference, trainer, rollout, reward, queue, weights",
        ),
        (
            "trainer: {nproc: two}",
            "my.yaml:2: trainer.nproc: got 'two', want a positive integer",
        ),
        ("trainer: {nproc: 0}", "my.yaml:2: trainer.nproc: got 0, want a positive integer"),
        ("trainer: {nproc: 1.5}", "my.yaml:2: trainer.nproc: got 1.5, want a positive integer"),
        ("trainer: {nproc: true}", "my.yaml:2: trainer.nproc: got true, want a positive integer"),
        ("actor: {optim: 3}", "my.yaml:2: actor.optim: got 3, want a section with"),
        (
            "rollout: {on_update: now}",
            "my.yaml:2: rollout.on_update: got 'now', want one of drain, interrupt, in_flight",
        ),
        (
            "queue: {max_staleness: soon}",
            "my.yaml:2: queue.max_staleness: got 'soon', want an integer >= 0 or inf",
        ),
        (
            "queue: {max_staleness: -1}",
            "my.yaml:2: queue.max_staleness: got -1, want an integer >= 0 or inf",
        ),
        (
            "actor: {optim: {betas: [0.9]}}",
            "my.yaml:2: actor.optim.betas.1 is missing; want a number",
        ),
        (
            "trainer: {logger: wandb}",
            "my.yaml:2: trainer.logger: got 'wandb', want a list, each text",
        ),
        (
            "reward: {functions: [{weight: 2}]}",
            "my.yaml:2: reward.functions.0.name is missing; want text",
        ),
        ("run: {name: a/b}", "my.yaml:2: run.name: got 'a/b', want text (Letters, digits"),
        (
            "weights: {late_quorum: 2}",
            "my.yaml:2: weights.late_quorum: got 2, want a positive number <= 1.0",
        ),
        ("rollout: {n: 2}\nrollout: {n: 3}", "my.yaml:3: rollout is given twice"),
        ("rollout: {n: [}", "my.yaml:2: not valid YAML: "),
    ],
)
def test_a_mistake_in_the_file_is_one_line(text: str, line: str) -> None:
    (only,) = said(MINIMAL + text)
    assert only.startswith(line)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("rollout.n", "command line: rollout.n: want key=value, as in rollout.n=8"),
        ("rollout..n=3", "command line: rollout..n=3: want key=value, as in rollout.n=8"),
        (
            "rollout.n=many",
            "command line: rollout.n=many: rollout.n: got 'many', want a positive integer",
        ),
        ("rollout.n=[", "command line: rollout.n=[: the value is not valid YAML"),
        (
            "data.train_files.2=x",
            "command line: data.train_files.2=x: data.train_files has items 0 to 0, not '2'",
        ),
        (
            "rolout.n=3",
            "command line: rolout.n=3: no such key 'rolout.n'; did you mean 'rollout.n'?",
        ),
    ],
)
def test_a_mistake_in_an_override_is_one_line(override: str, line: str) -> None:
    assert said(MINIMAL + "data: {train_files: [a.parquet]}", override) == [line]


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
    assert any("use_torch_compile: routers of compiled layers are told nothing" in t for t in said)


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


class TestChecksOfTheWholeRecipe:
    """Faults that only the whole recipe, or the machine, can show."""

    @pytest.fixture(autouse=True)
    def _files(self) -> None:
        Path("model").mkdir()
        config = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 2048}
        Path("model/config.json").write_text(json.dumps(config))
        write_weights(Path("model/model.safetensors"))
        write_tokenizer(Path("model"))
        Path("train.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
        Path("mine.py").write_text("def compute_score(**sample):\n    return 0.0\n")

    TEXT = """
model: {path: model}
data: {train_files: [train.jsonl], train_batch_size: 32}
reward: {custom_reward_function: {path: mine.py}}
"""

    def said(self, *overrides: str) -> list[str]:
        Path("my.yaml").write_text(self.TEXT)
        with pytest.raises(ConfigError) as caught:
            load_recipe(Path("my.yaml"), overrides)
        return str(caught.value).splitlines()

    def test_a_good_recipe_is_good(self) -> None:
        Path("my.yaml").write_text(self.TEXT)
        assert load_recipe(Path("my.yaml")).data.train_batch_size == 32

    @pytest.mark.parametrize(
        ("override", "line"),
        [
            (
                "actor.ppo_mini_batch_size=7",
                "actor.ppo_mini_batch_size: 7 does not divide data.train_batch_size, 32",
            ),
            (
                "actor.ppo_max_token_len_per_gpu=1000",
                "actor.ppo_max_token_len_per_gpu: 1000 is less than one row may have, 1024 "
                "(data.max_prompt_length + data.max_response_length)",
            ),
            (
                "data.max_response_length=4096",
                "data.max_response_length: prompt and response may have 4608 tokens, "
                "and the model in model takes 2048",
            ),
            (
                "model.path=modle",
                "model.path: no such directory: modle (did you mean model?); want the directory "
                "of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer)",
            ),
            (
                "data.train_files=[trian.jsonl]",
                "data.train_files.0: no such file: trian.jsonl (did you mean train.jsonl?)",
            ),
            (
                "data.train_files=[]",
                "data.train_files is empty; want parquet or jsonl files, or data.reasoning_gym",
            ),
            (
                "data.val_files=[mine.py]",
                "data.val_files.0: mine.py: want .csv, .json, .jsonl or .parquet, or name a reader of your own"
                " (data.reader)",
            ),
            (
                "reward.custom_reward_function.path=mien.py",
                "reward.custom_reward_function.path: no such file: mien.py (did you mean mine.py?)",
            ),
            (
                "reward.functions=[{name: score, path: mien.py}]",
                "reward.functions.0.path: no such file: mien.py (did you mean mine.py?)",
            ),
            (
                "rollout.name=my.engines.fast",
                "rollout.name: no module 'my.engines.fast' can be imported",
            ),
            (
                "rollout.program_options={max_turns: 3}",
                "rollout.program_options: the program 'single_turn' takes none",
            ),
            (
                "rollout={program: tools, program_options: {tools: [nowhere.py:add]}}",
                "rollout.program_options.tools.0.function: no such file: nowhere.py",
            ),
            (
                "rollout={program: user, program_options: {function: my.agents.talk}}",
                "rollout.program_options.function: no module 'my.agents' can be imported",
            ),
            (
                "rollout={program: tools, program_options: {tools: [a.b], max_turn: 3}}",
                "rollout.program_options.max_turn: no such option; did you mean 'max_turns'?",
            ),
            (
                "rollout={program: user, program_options: {}}",
                "rollout.program_options.function: Field required (got {})",
            ),
        ],
    )
    def test_one_line_says_what_to_change(self, override: str, line: str) -> None:
        (only,) = self.said(override)
        assert only == f"command line: {override}: {line}"

    @pytest.mark.parametrize(
        ("override", "start"),
        [
            ("rollout.name=torhc", "rollout.name: got 'torhc'; did you mean 'torch'? (known: "),
            ("queue.store=mmeory", "queue.store: got 'mmeory'; did you mean 'memory'? (known: "),
            (
                "algorithm.adv_estimator=grop",
                "algorithm.adv_estimator: got 'grop'; did you mean 'grpo'?",
            ),
            ("weights.carrier=glue", "weights.carrier: got 'glue'"),
            (
                "weights.ipc.library=cupi",
                "weights.ipc.library: got 'cupi'; did you mean 'cupy'?",
            ),
            (
                "weights.nccl.library=cupi",
                "weights.nccl.library: got 'cupi'; did you mean 'cupy'?",
            ),
        ],
    )
    def test_an_unknown_name_is_answered_with_the_known_ones(
        self, override: str, start: str
    ) -> None:
        (only,) = self.said(override)
        assert only.startswith(f"command line: {override}: {start}")
        assert "or a dotted path" in only

    def test_a_reference_that_is_needed_and_missing_names_who_needs_it(self) -> None:
        (only,) = self.said("actor.use_kl_loss=true", "reference.path=frozen")
        assert only.endswith("(actor.use_kl_loss needs `ref_logprobs`)")
        Path("my.yaml").write_text(self.TEXT)
        assert load_recipe(Path("my.yaml"), ["reference.path=frozen"])


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
