"""Inputs of new users, each told by the check of a recipe in one line, with what would be right.

The numbers are those of the list of inputs that were reported. The others of it are no matter of a check: 1 and 3 are
good, 2, 4, 5, 7, 10, 11 and 23 have tests where they are computed, and 16 is in tests/unit/verl.
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest

from meshrl.cli.demo.tiny_model import write_tiny_model
from meshrl.config import load_recipe
from meshrl.config.checks import warnings
from meshrl.config.machine import AssumedMachine, Assumptions, ThisMachine
from meshrl.contract.errors import ConfigError

from ...pairs import fits
from ...small_checkpoint import write_tokenizer, write_weights
from ..trainer.published_templates import PUBLISHED
from ..trainer.test_prompts import WRONG_ROWS

RECIPE = """
model: {path: model}
data: {train_files: [train.jsonl], max_prompt_length: 32, max_response_length: 32}
reward: {custom_reward_function: {path: reward.py}}
"""
CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 97}
CONFIG |= {"max_position_embeddings": 512}
LAYER = "model.layers.0"
TENSORS = {
    "model.embed_tokens.weight": (97, 0),
    "lm_head.weight": (97, 0),
    f"{LAYER}.self_attn.q_proj.weight": (8, 0),
    f"{LAYER}.self_attn.k_proj.weight": (8, 0),
    f"{LAYER}.input_layernorm.weight": (0,),
}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
STRICT = (
    "{{ raise_exception('no system') if messages[0].role == 'system' }}{{ messages[0].content }}"
)
GOOD = {"prompt": "1+1?", "answer": "2"}
INDEX = "model.safetensors.index.json"
Files = Mapping[str, Any]
Make = Callable[[], object]


def user(text: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": text}]


def write(name: str, content: Any) -> None:
    """Rows by the suffix of `name`, bytes, or a text."""
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_text(content)
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(content), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in content))


def model(name: str = "model", config: Mapping[str, Any] = CONFIG, **tokenizer: Any) -> Path:
    path = Path(name)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path, **tokenizer)
    write_weights(path / "model.safetensors", TENSORS)
    return path


def sharded(name: str, listed: Mapping[str, str], written: Mapping[str, Sequence[str]]) -> None:
    path = model(name)
    (path / "model.safetensors").unlink()
    (path / INDEX).write_text(json.dumps({"weight_map": listed}))
    for file, tensors in written.items():
        write_weights(path / file, tensors)


def pickled() -> None:
    (model("pickled") / "model.safetensors").rename("pickled/pytorch_model.bin")


def cut_short() -> None:
    file = model("cut") / "model.safetensors"
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(7))


def pointer() -> None:
    (model("pointer") / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\n"
    )


def broken_tokenizer() -> None:
    (model("broken") / "tokenizer.json").write_text("{}")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model()
    write("my.yaml", RECIPE)
    write("train.jsonl", [GOOD])
    write(
        "reward.py",
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...\n",
    )


TRAIN = "data.train_files.0: "
ROWS: list[tuple[str, Any, str]] = [
    # of the list: 8, 17, 19, 21, 24
    (
        "t.parquet",
        [{"prompt": "x", "answer": math.nan}],
        "t.parquet:0: no 'answer'; it is null or NaN; say where",
    ),
    (
        "t.parquet",
        [{"prompt": "x", "answer": datetime.date(2026, 1, 1)}],
        "t.parquet:0: 'answer' is datetime.date(2026, 1, 1) (date), want text, a number, ",
    ),
    (
        "t.jsonl",
        [{"prompt": "x" * 40, "answer": "1"}, {"prompt": "x" * 36, "answer": "1"}],
        "no prompts in t.jsonl: each has more tokens than data.max_prompt_length 32; want at least 36 there",
    ),
    (
        "t.json",
        json.dumps([GOOD, GOOD], indent=1),
        "t.json:1: the file is one array, want one object a line: jq -c '.[]' t.json > NEW.jsonl",
    ),
    # of the same kinds
    (
        "t.json",
        json.dumps([GOOD]),
        "t.json:1: the file is one array, want one object a line: jq -c '.[]'",
    ),
    (
        "t.json",
        json.dumps(GOOD, indent=1),
        "t.json:1: the file is one object, want one object a line: jq -c '.'",
    ),
    ("t.jsonl", "[1]\n", "t.jsonl:1: a row is an object, not list"),
    (
        "t.jsonl",
        '{"prompt": "x", "answer": NaN}\n',
        "t.jsonl:1: no 'answer'; it is null or NaN; say where",
    ),
    ("t.jsonl", b"\xff\xfe\n", "t.jsonl:1: not JSON: "),
    ("t.jsonl", "\n\n", "no prompts in t.jsonl: want rows with a prompt"),
    (
        "t.csv",
        "question,answer\n1+1,2\n",
        "t.csv:2: no 'prompt' (data.prompt_key); the row has question, answer",
    ),
    (
        "t.csv",
        "prompt,answer\n\"[{'role': 'user', 'content': 'x'}]\",1\n",
        "t.csv:2: 'prompt' is a list of messages written as text, want the list itself (parquet or jsonl)",
    ),
    (
        "t.parquet",
        [{"prompt": "x", "answer": decimal.Decimal("3.50")}],
        "t.parquet:0: 'answer' is Decimal('3.50') (Decimal), want text, a number, ",
    ),
    (
        "t.parquet",
        [{"prompt": "x", "answer": b"3"}],
        "t.parquet:0: 'answer' is b'3' (bytes), want text, a number, ",
    ),
    (
        "t.parquet",
        [
            {
                "prompt": "x",
                "answer": "1",
                "extra_info": {"a": [{"when": datetime.datetime(2026, 1, 1)}]},
            }
        ],
        "t.parquet:0: 'extra_info.a.0.when' is datetime.datetime(2026, 1, 1, 0, 0) (datetime), want text, ",
    ),
    (
        "t.parquet",
        [{"prompt": "x", "reward_model": {"ground_truth": datetime.time(9)}}],
        "t.parquet:0: 'reward_model.ground_truth' is datetime.time(9, 0) (time), want text, a number, ",
    ),
    (
        "t.jsonl",
        [*[GOOD] * 6, {"prompt": "x", "reward_model": {"style": "rule", "ground_truth": None}}],
        "t.jsonl:7: no 'reward_model.ground_truth'; it is null or NaN; say where the answer is",
    ),
    (
        "t.jsonl",
        [{"prompt": user("x"), "answer": "1"}],
        "t.jsonl:1: the prompt is a chat and the tokenizer has no chat template",
    ),
    (
        "t.tsv",
        "prompt\tanswer\n",
        "t.tsv: want .csv, .json, .jsonl or .parquet, or name a reader of your own",
    ),
    (
        "t.jsonl.gz",
        b"\x1f\x8b",
        "t.jsonl.gz: want .csv, .json, .jsonl or .parquet, or name a reader of your own",
    ),
    (
        "t.csv",
        "prompt,answer,answer\na,b,c\n",
        "t.csv:1: two columns are called 'answer'; want one of each name",
    ),
    (
        "t.jsonl",
        '{"prompt": "x", "answer": ' + "[" * 800 + "]" * 800 + "}\n",
        "t.jsonl:1: the row is nested too deeply; want fewer levels",
    ),
    ("t.parquet", b"PAR1", "t.parquet: not a readable parquet file: "),
]
"""A file of training data, and what is said of it behind its key."""

OWN = "reward.custom_reward_function"
NO_REWARD = f"{OWN}=null"
SAYS: list[tuple[str, Files, Make | None, Sequence[str], str]] = [
    # of the list: 9, 12, 20, 25
    (
        "9",
        {"my.yaml": RECIPE.replace("reward:", "#")},
        None,
        [],
        "data.train_files.0: train.jsonl:1: the row has no data_source, by which the reward verl finds",
    ),
    (
        "12",
        {"t.jsonl": [{"prompt": "<a><b>", "answer": "1"}]},
        lambda: model("large", added=["<a>", "<b>", "<c>"]),
        ["model.path=large", "data.train_files=[t.jsonl]"],
        "data.train_files.0: t.jsonl:1: the prompt has the token 97 ('<b>'), and the model knows 0 to 96"
        " (vocab_size of config.json); want the model's own tokenizer",
    ),
    (
        "20",
        {},
        pickled,
        ["model.path=pickled"],
        "model.path: pickled has its weights in pytorch_model.bin, and only model.safetensors is read: write it with",
    ),
    (
        "25",
        {"my.yaml": RECIPE.replace("reward:", "#"), "train.jsonl": [{**GOOD, "data_source": "gsm8k"}]},
        None,
        [],
        "data.train_files.0: train.jsonl:1: no scorer for data_source 'gsm8k'; did you mean 'openai/gsm8k'? (known: ",
    ),
    # of the same kinds: rows and their reward
    (
        "held-out rows without a scorer",
        {
            "my.yaml": RECIPE.replace("reward:", "#"),
            "train.jsonl": [{**GOOD, "data_source": "openai/gsm8k"}],
            "v.jsonl": [{**GOOD, "data_source": "mine"}],
        },
        None,
        ["data.val_files=[v.jsonl]"],
        "data.val_files.0: v.jsonl:1: no scorer for data_source 'mine' (known: ",
    ),
    (
        "programs without a sandbox",
        {"my.yaml": RECIPE.replace("reward:", "#"), "train.jsonl": [{**GOOD, "data_source": "apps"}]},
        None,
        [],
        "data.train_files.0: train.jsonl:1: data_source 'apps': code runs programs of the policy: set"
        " reward.recipe_sandbox: strict",
    ),
    (
        "tasks without a scorer",
        {"my.yaml": RECIPE.replace("reward:", "#")},
        None,
        ["data={reasoning_gym: {tasks: {gcd: {}}, chat: false}, max_prompt_length: 32, max_response_length: 32}"],
        "data.reasoning_gym: no scorer for data_source 'gcd' (known: ",
    ),
    (
        "a tokenizer of more words than the model has",
        {},
        lambda: model("small", config={**CONFIG, "vocab_size": 90}),
        ["model.path=small"],
        "model.path: the tokenizer in small has 96 tokens, and the model knows 90 (vocab_size of config.json): rows",
    ),
    (
        "a bias of a token that the model lacks",
        {},
        None,
        ["rollout.val_kwargs.logit_bias={97: -100}"],
        "rollout.val_kwargs.logit_bias: token 97, and the model knows 0 to 96",
    ),
    (
        "a template that refuses",
        {"t.jsonl": [{"prompt": [{"role": "system", "content": "s"}, *user("x")], "answer": "1"}]},
        lambda: model("strict", chat_template=STRICT),
        ["model.path=strict", "data.train_files=[t.jsonl]"],
        "data.train_files.0: t.jsonl:1: the chat template refuses messages of system, user: no system",
    ),
    (
        "too long for truncation",
        {"t.jsonl": [{"prompt": "x" * 40, "answer": "1"}]},
        None,
        ["data.train_files=[t.jsonl]", "data.filter_overlong_prompts=false"],
        "data.train_files.0: t.jsonl:1: 40 tokens > data.max_prompt_length 32; raise it, or set"
        " data.filter_overlong_prompts or data.truncation",
    ),
    (
        "a template longer than a prompt may be",
        {"t.jsonl": [{"prompt": user("x"), "answer": "1"}]},
        lambda: model("wordy", chat_template="y" * 50 + TEMPLATE),
        ["model.path=wordy", "data.train_files=[t.jsonl]"],
        "data.train_files.0: no prompts in t.jsonl: each has more tokens than data.max_prompt_length 32; want at"
        " least 51",
    ),
    # checkpoints
    (
        "a model that is not there",
        {"t.jsonl": [{**GOOD, "images": []}]},
        None,
        ["data.train_files=[t.jsonl]", "model.path=modle"],
        "model.path: no such directory: modle (did you mean model?); want the directory of a Hugging Face checkpoint",
    ),
    ("weights cut short", {}, cut_short, ["model.path=cut"], "model.path: cut/model.safetensors has "),
    (
        "a pointer of git-lfs",
        {},
        pointer,
        ["model.path=pointer"],
        "model.path: pointer/model.safetensors is a pointer of git-lfs; want the weights: git lfs pull",
    ),
    (
        "a shard that is not there",
        {},
        lambda: sharded("gone", {"a": "1.safetensors", "b": "2.safetensors"}, {"1.safetensors": ["a"]}),
        ["model.path=gone"],
        "model.path: gone lacks 1 of the 2 files that model.safetensors.index.json names, as 2.safetensors: want all",
    ),
    (
        "a tensor that is not there",
        {},
        lambda: sharded("less", {"a": "1.safetensors", "b": "1.safetensors"}, {"1.safetensors": ["a"]}),
        ["model.path=less"],
        "model.path: less/1.safetensors lacks 1 tensor, as b: want the index and the files of one checkpoint",
    ),
    (
        "a tensor too many",
        {},
        lambda: sharded("more", {"a": "1.safetensors"}, {"1.safetensors": ["a", "b"]}),
        ["model.path=more"],
        "model.path: more/1.safetensors has beside what model.safetensors.index.json names 1 tensor, as b: want the",
    ),
    (
        "an index without tensors",
        {},
        lambda: sharded("none", {}, {}),
        ["model.path=none"],
        f"model.path: none/{INDEX} has no weight_map; want the index that came with the weights",
    ),
    (
        "a tokenizer that is none",
        {},
        broken_tokenizer,
        ["model.path=broken"],
        "model.path: no tokenizer in broken: ",
    ),
    # functions
    (
        "columns that are not all",
        {"reward.py": "def compute_score(data_sources, solution_strs, ground_truths): ...\n"},
        None,
        [],
        f"{OWN}: reward.py:1: compute_score(data_sources, solution_strs, ground_truths) cannot be called: missing a",
    ),
    (
        "columns without an argument of the recipe",
        {"reward.py": "def compute_score(data_sources, solution_strs, ground_truths, extra_infos): ...\n"},
        None,
        [f"{OWN}.reward_kwargs={{bonus: 1}}"],
        f"{OWN}: reward.py:1: compute_score(data_sources, solution_strs, ground_truths, extra_infos) cannot be"
        " called: got an unexpected keyword argument 'bonus' (it is called with data_sources, ",
    ),
]  # fmt: skip
"""Description, files, a function that makes others, overrides, and the error line after the key's place."""


def told(*overrides: str) -> str:
    """The only line. Raises where there are several, or none."""
    with pytest.raises(ConfigError) as caught:
        load_recipe(Path("my.yaml"), overrides)
    (line,) = str(caught.value).splitlines()
    return line


def test_the_recipe_that_the_mistakes_are_made_in_is_good() -> None:
    load_recipe(Path("my.yaml"), ["rollout.val_kwargs.n=4", "data.val_files=[train.jsonl]"])


@pytest.mark.parametrize(("row", "said"), WRONG_ROWS)
def test_a_row_that_cannot_be_trained_on(row: list[str], said: str) -> None:
    write("t.jsonl", json.dumps(GOOD) + "\n" + row[0])
    assert fits(
        told("data.train_files=[t.jsonl]"),
        f"command line: data.train_files=[t.jsonl]: {TRAIN}t.jsonl:2: {said}",
    )


@pytest.mark.parametrize(("file", "content", "line"), ROWS, ids=[line[:40] for *_, line in ROWS])
def test_a_file_that_cannot_be_trained_on(file: str, content: Any, line: str) -> None:
    write(file, content)
    override = f"data.train_files=[{file}]"
    assert told(override).startswith(f"command line: {override}: {TRAIN}{line}")


@pytest.mark.parametrize(
    ("files", "make", "overrides", "line"),
    [case[1:] for case in SAYS],
    ids=[case[0] for case in SAYS],
)
def test_a_recipe_that_would_not_take_its_first_step(
    files: Files, make: Make | None, overrides: Sequence[str], line: str
) -> None:
    for name, content in files.items():
        write(name, content)
    if make is not None:
        make()
    said = told(*overrides)
    origins = [f"command line: {override}: " for override in overrides]
    assert said.startswith(
        tuple(origin + line for origin in (*origins, "my.yaml: ", "my.yaml:3: ", "my.yaml:4: "))
    )


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (
            "def compute_score(text): ...\n",
            ":1: compute_score(text) cannot be called: missing a required",
        ),
        (
            "def score(**given): ...\n",
            " defines no 'compute_score' (it defines score; wanted: compute_score(",
        ),
    ],
)
def test_a_module_of_rewards_is_named_by_its_file(source: str, line: str) -> None:
    write("their/__init__.py", "")
    write("their/reward.py", source)
    override = "reward.functions=[{name: their.reward}]"
    place = (
        f"command line: {override}: reward.functions.0.name: {Path('their/reward.py').absolute()}"
    )
    assert told(override).startswith(place + line)


@pytest.mark.parametrize(
    "source",
    [
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos): ...\n",
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos, **more): ...\n",
        "\ufeffdef compute_score(data_source, solution_str, ground_truth, extra_info=None): ...\n",
    ],
    ids=["3", "3, with more", "15, a byte order mark"],
)
def test_what_verl_and_python_take_is_good(source: str) -> None:
    write("reward.py", source)
    load_recipe(Path("my.yaml"))


def test_numbers_with_leading_zeros_are_decimal_in_overrides_and_files() -> None:
    write("my.yaml", RECIPE + "rollout: {n: 08}\n")
    recipe = load_recipe(Path("my.yaml"), ["run.seed=010", "data.seed=09", "actor.optim.lr=01e-3"])
    assert (recipe.rollout.n, recipe.run.seed, recipe.data.seed) == (8, 10, 9)
    assert recipe.actor.optim.lr == 0.001


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["actor.optim.lr_warmup_steps=500", "trainer.total_training_steps=40"],
            "actor.optim.lr_warmup_steps: 500, and the run has 40 steps: lr is never reached",
        ),
        (
            ["actor.optim={lr_warmup_steps: 40, lr_decay_steps: 10, lr_scheduler_type: cosine}"],
            "actor.optim.lr_decay_steps: 10, and lr_warmup_steps is 40, counted with it: want more",
        ),
        (
            ["actor.optim.lr_decay_steps=10"],
            "actor.optim.lr_decay_steps: lr_scheduler_type is constant, which does not decay; want cosine or linear",
        ),
        (
            ["actor.optim.min_lr_ratio=2"],
            "actor.optim.min_lr_ratio: 2: the rate rises to the end; want at most 1",
        ),
        (
            ["rollout.temperature=0"],
            "rollout.temperature: algorithm.adv_estimator grpo compares the rows of a group, and greedy ones are all",
        ),
        (
            ["rollout.top_k=1"],
            "rollout.temperature: algorithm.adv_estimator grpo compares the rows of a group, and greedy ones are all",
        ),
    ],
)
def test_what_starts_and_is_hardly_meant_is_a_warning(
    overrides: Sequence[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load_recipe(Path("my.yaml"), overrides)
    warnings = [said for said in capsys.readouterr().err.splitlines() if line in said]
    assert len(warnings) == 1 and warnings[0].startswith("warning: ")


def test_a_row_that_names_no_task_of_an_environment_is_told() -> None:
    write("t.jsonl", [{**GOOD, "extra_info": {"index": 3}}, {**GOOD, "extra_info": {"index": -1}}])
    played = "rollout={program: verifiers, program_options: {python: py, env: {taskset: {id: x}}}}"
    there = AssumedMachine(Assumptions(programs={"py": True}))
    with pytest.raises(ConfigError) as caught:
        load_recipe(Path("my.yaml"), [played, "data.train_files=[t.jsonl]"], machine=there)
    (line,) = str(caught.value).splitlines()
    assert line.endswith(
        "t.jsonl:2: extra_info.index is -1, want the number of a task of the environment"
    )


def test_added_tokens_that_the_model_lacks_are_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model("large", added=["<a>", "<b>", "<c>"])
    load_recipe(Path("my.yaml"), ["model.path=large"])
    assert "large has 99 tokens, and the model knows 97 (vocab_size" in capsys.readouterr().err


def test_a_file_that_begins_with_long_prompts_is_read_up_to_one_that_fits() -> None:
    write("t.jsonl", [*[{"prompt": "x" * 40, "answer": "1"}] * 20, GOOD])
    load_recipe(Path("my.yaml"), ["data.train_files=[t.jsonl]"])


def test_of_a_machine_that_is_elsewhere_only_the_recipe_is_checked() -> None:
    far = AssumedMachine(Assumptions(gpus=8), elsewhere=True)
    there = [
        "model.path=/models/Qwen2.5-7B",
        "data={train_files: [/data/a.parquet], val_files: [/data/b.jsonl]}",
        "rollout={name: vllm, program: verifiers, program_options: {env: {taskset: {id: sums}}}}",
        "weights.carrier=nccl",
        "trainer={device: cuda, logger: [console, wandb]}",
        "model.lora_rank=8",
        "reward.recipe_sandbox=strict",
        "reward.judges=[{kind: model, options: {path: /models/judge}}]",
    ]
    recipe = load_recipe(Path("my.yaml"), there, machine=far, hub=False)
    assert recipe.model.path == Path("/models/Qwen2.5-7B")
    with pytest.raises(ConfigError, match=r"/data/a.tsv: want \.csv"):
        load_recipe(
            Path("my.yaml"), [*there, "data.train_files=[/data/a.tsv]"], machine=far, hub=False
        )


def told_of(model: Path, program: str, options: str, key: str) -> list[str]:
    """The warnings at a key of `rollout`."""
    of_program = [f"rollout.program={program}", f"rollout.program_options={options}"]
    demo = Path(__file__).parents[3] / "recipes/demo/recipe.yaml"
    recipe = load_recipe(demo, [f"model.path={model}", *of_program], check=False)
    return [text for at, text in warnings(recipe, ThisMachine()) if at[-1] == key]


@pytest.mark.parametrize(
    ("kind", "branch", "told"),
    [
        ("Qwen3", "last", "before a message of user, and rows keep them"),
        ("DeepSeek-R1", "last", "before a message of user and tool"),
        ("GLM-4.5", "last", "before a message of user, and rows keep them"),
        ("gpt-oss", "last", "before a message of user and tool"),
        ("Qwen3", "each", ""),
        ("Qwen2.5", "last", ""),
    ],
)
@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("openai", "{{command: [true], branch: {}}}"),
        ("container_agent", "{{command: [true], branch: {}}}"),
        ("verifiers", "{{env: {{taskset: {{id: sums}}}}, session: {{branch: {}}}}}"),
    ],
)
def test_a_template_that_leaves_thoughts_out_is_told_to_agents(
    kind: str, branch: str, told: str, program: str, options: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    PUBLISHED[kind].tokenizer().save_pretrained(model)
    said = told_of(model, program, options.format(branch), "program_options")
    assert len(said) == bool(told) and told in "".join(said)


@pytest.mark.parametrize(
    ("program", "options", "told"),
    [
        ("openai", "{external: true}", "all that agents ask in messages is refused"),
        ("seats", "{function: game.play, seats: {pro: {}}}", "no seat of the policy can be told"),
        ("tools", "{tools: [game.look]}", "the policy cannot be shown what a tool returns"),
        ("container", "{}", "the policy cannot be shown what a tool returns"),
        ("tools", "{tools: [game.look], format: search_r1}", ""),
        ("user", "{function: game.play}", ""),
        ("single_turn", "{}", ""),
    ],
)
def test_a_tokenizer_without_a_chat_template_is_told_to_programs_that_speak_in_messages(
    program: str, options: str, told: str, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path / "model")
    said = told_of(tmp_path / "model", program, options, "program")
    assert len(said) == bool(told) and told in "".join(said)


@pytest.mark.parametrize(("role", "told"), [("tool", 1), ("user", 0)])
def test_a_template_that_refuses_results_is_told(role: str, told: int, tmp_path: Path) -> None:
    PUBLISHED["Gemma"].tokenizer().save_pretrained(tmp_path)
    options = f"{{tools: [game.look], role: {role}}}"
    assert len(told_of(tmp_path, "tools", options, "program_options")) == told
