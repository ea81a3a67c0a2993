"""Sixty wrong recipes, each with the line that it gets before anything starts; nothing is imported that computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshrl.config import load_recipe
from meshrl.config.loading import Written
from meshrl.config.machine import AssumedMachine, Assumptions, ThisMachine
from meshrl.contract.errors import ConfigError

from ...pairs import fits, pairs
from ...small_checkpoint import write_tokenizer, write_weights

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    return scale * (solution_str == ground_truth)

def too_few(solution_str, ground_truth):
    return 0.0
"""
QWEN = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 2048}
MIXTURE = {**QWEN, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}
MIXTURE |= {"num_experts_per_tok": 2}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}
PACKAGES = ("torch", "transformers", "peft", "sympy", "math-verify", "latex2sympy2_extended")


MACHINE = {
    "gpus": 2,
    "packages": {
        **dict.fromkeys(PACKAGES, True),
        **dict.fromkeys(
            ("vllm", "sglang", "cupy", "redis", "wandb", "tensorboard", "reasoning_gym"), False
        ),
    },
    "programs": {
        "/venv/bin/python": True,
        "/gone/python": False,
        "serve-it": False,
        "bwrap": False,
    },
    "models": {
        "model": QWEN,
        "gemma": {"architectures": ["Gemma2ForCausalLM"]},
        "deepseek": {"architectures": ["DeepseekV3ForCausalLM"]},
        "heads": {**QWEN, **HEADS},
        "odd": {**QWEN, **HEADS, "num_key_value_heads": 4, "intermediate_size": 90},
        "chunked": {**QWEN, "layer_types": ["full_attention", "chunked_attention"]},
        "hybrid": {**QWEN, "text_config": {"layer_types": ["linear_attention"]}},
        "unlisted": {**QWEN, "text_config": {"model_type": "jamba"}},
        "kimi": {**QWEN, **HEADS, "model_type": "kimi_linear", "num_experts": 4},
        "stateful": {**QWEN, **HEADS, "model_type": "qwen3_next"},
        "bart": {**QWEN, "model_type": "bart"},
        "gelu": {**QWEN, "hidden_act": "gelu"},
        "dynamic": {**QWEN, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    },
    "rows": {
        "train.jsonl": [{"prompt": "1+1?", "answer": "2"}],
        "question.jsonl": [{"question": "1+1?", "answer": "2"}],
        "empty.jsonl": [],
        "unanswered.jsonl": [{"prompt": "1+1?"}],
        "misspelt.jsonl": [{"prompt": "1+1?", "answer": "2"}, {"prompt": "?", "anwser": "2"}],
        "image.jsonl": [{"prompt": "<image>x", "images": ["x.png"], "answer": "2"}],
    },
    "files": {
        "reward.py": REWARD,
        "broken.py": "def compute_score(:\n    pass\n",
        "other.py": "def compute_scores():\n    pass\n",
    },
}
RECIPE = """
model: {path: model}
data: {train_files: [train.jsonl], max_prompt_length: 512, max_response_length: 512}
reward: {functions: [{name: exact_match}]}
"""
WRONG = pairs(Path(__file__).with_name("wrong_recipes.txt"))
"""Overrides that make a good recipe wrong, and the line that they get; … stands for any text."""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that the assumed machine does not describe: a checkpoint with weights, agents, a file that is no data."""
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(RECIPE)
    Path("machine.yaml").write_text(json.dumps(MACHINE))
    Path("agent.py").write_text("def debate(base_url, api_key, task): ...\ndef add(a: int): ...\n")
    Path("broken_agent.py").write_text("def debate(:\n")
    Path("text.jsonl").write_text("1 + 1 = 2\n")
    chat = [{"role": "user", "content": "hello"}]
    Path("chat.jsonl").write_text(json.dumps({"prompt": chat, "answer": "hi"}))
    Path("empty").mkdir()
    Path("empty/readme").write_text("")
    layer = "model.layers.0"
    qk = [f"{layer}.self_attn.{name}_proj.weight" for name in "qk"]
    experts = [f"{layer}.mlp.experts.0.{name}_proj.weight" for name in ("gate", "up", "down")]
    for name, more in (
        ("lora", []),
        ("model", []),
        ("mixture", [*experts, f"{layer}.mlp.gate.weight"]),
        ("biased", ["lm_head.weight", "lm_head.bias"]),
    ):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(MIXTURE if name == "mixture" else QWEN))
        write_tokenizer(Path(name))
        write_weights(Path(name, "model.safetensors"), [*qk, *more])
    shapes = dict.fromkeys(qk, (8, 0)) | {f"{layer}.input_layernorm.weight": (0,)}
    shapes |= {"model.embed_tokens.weight": (97, 0), "lm_head.weight": (97, 0)}
    write_weights(Path("lora/model.safetensors"), shapes)


TENSOR = ["trainer.nproc=4", "trainer.parallel.tensor=4"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["model.path=heads", *TENSOR],
            "trainer.parallel.tensor: 4 does not divide the 2 key heads of heads; want 1 or 2",
        ),
        (
            ["model.path=odd", *TENSOR],
            "trainer.parallel.tensor: 4 does not divide the 90 intermediate_size of odd; want 1 or 2",
        ),
        (
            ["model.path=stateful", "trainer.nproc=2", "trainer.parallel.tensor=2"],
            "trainer.parallel.tensor: layers that keep a state from one token to the next are not shared by sequence",
        ),
        (
            ["model.path=stateful", "trainer.nproc=2", "model.ulysses_sequence_parallel_size=2"],
            "model.ulysses_sequence_parallel_size: layers that keep a state from one token to the next are not",
        ),
        (
            ["model.path=kimi", "trainer.nproc=2", "trainer.parallel.expert=2"],
            "trainer.parallel.expert: the experts of kimi_linear are not shared among ranks; want 1",
        ),
        (
            ["model.path=mixture", "actor.moe_router_bias_update_rate=0.001"],
            "actor.moe_router_bias_update_rate: the routers of mixture have no e_score_correction_bias; want 0, or",
        ),
    ],
)
def test_what_the_trainer_would_refuse_of_a_model_is_one_line(
    overrides: list[str], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(Path("my.yaml"), overrides, machine=machine())
    (only,) = str(caught.value).splitlines()
    assert only.startswith(f"command line: {overrides[-1]}: {says}")


def test_what_the_trainer_can_do_with_such_models_is_good() -> None:
    latent = {**QWEN, **HEADS, "kv_lora_rank": 8}
    assumed = Written.read(Path("machine.yaml"), ()).as_config(Assumptions)
    models = {**assumed.models, Path("heads"): latent}
    here = AssumedMachine(assumed.model_copy(update={"gpus": 8, "models": models}))
    load_recipe(Path("my.yaml"), ["model.path=heads", *TENSOR], machine=here)
    for targets in ("[q_proj]", "all-linear", "'.*self_attn.*'"):
        adapted = f"model={{path: mixture, lora_rank: 8, target_modules: {targets}}}"
        load_recipe(Path("my.yaml"), [adapted], machine=machine())


def machine(*, real_model: bool = False) -> AssumedMachine:
    assumed = Written.read(Path("machine.yaml"), ()).as_config(Assumptions)
    if real_model:
        assumed = assumed.model_copy(update={"models": {}})
    return AssumedMachine(assumed)


def test_the_recipe_that_the_mistakes_are_made_in_is_good() -> None:
    load_recipe(Path("my.yaml"), machine=machine())
    load_recipe(Path("my.yaml"), ["reference.path=frozen"], machine=machine())  # nobody asks it


def test_there_are_at_least_sixty_wrong_recipes() -> None:
    assert len({tuple(overrides) for overrides, _ in WRONG}) == len(WRONG) >= 60


@pytest.mark.parametrize(("overrides", "line"), WRONG, ids=["; ".join(at) for at, _ in WRONG])
def test_a_wrong_recipe_is_one_line_before_anything_starts(overrides: list[str], line: str) -> None:
    here = machine(real_model="data.train_files=[chat.jsonl]" in overrides)
    with pytest.raises(ConfigError) as caught:
        load_recipe(Path("my.yaml"), overrides, machine=here)
    (only,) = str(caught.value).splitlines()
    origins = [
        *(f"command line: {override}: " for override in overrides),
        "my.yaml: ",
        "my.yaml:3: ",
    ]
    rest = next(only.removeprefix(origin) for origin in origins if only.startswith(origin))
    assert fits(rest, line), only


@pytest.mark.parametrize(
    ("override", "wrong"),
    [
        (
            "data.train_files=[train.jsonl]",
            "says which prompts are asked, and so does data.train_files: leave one out",
        ),
        ("data.curriculum=length", "and so does data.curriculum: leave one out"),
        ("trainer.test_freq=-1", "follows held-out scores: want trainer.test_freq above 0"),
        (
            "data.val_max_samples=9",
            "follows the scores of all 100 held-out prompts: leave data.val_max_samples out",
        ),
    ],
)
def test_what_keeps_levels_from_following_scores_is_said(override: str, wrong: str) -> None:
    gym = "data={reasoning_gym: {tasks: {gcd: {}}, levels: 2, curriculum: {raise_at: 0.7}}}"
    with pytest.raises(ConfigError) as caught:
        load_recipe(Path("my.yaml"), [gym, "trainer.test_freq=5", override], machine=machine())
    lines = [line for line in str(caught.value).splitlines() if wrong in line]
    assert len(lines) == 1 and "data.reasoning_gym.curriculum: " in lines[0]


def test_a_group_of_one_row_with_a_group_baseline_is_warned_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load_recipe(Path("my.yaml"), ["rollout.n=1", "rollout.name=torch"], machine=machine())
    assert capsys.readouterr().err == (
        "warning: command line: rollout.n=1: rollout.n: algorithm.adv_estimator grpo compares the rows of a group,"
        " and a group of one row has advantage 0: nothing is learned; raise rollout.n\n"
    )
    load_recipe(
        Path("my.yaml"),
        ["rollout.n=1", "rollout.name=torch", "algorithm.adv_estimator=reinforce_plus_plus"],
        machine=machine(),
    )
    assert not capsys.readouterr().err


def test_checking_a_recipe_imports_neither_torch_nor_grpc() -> None:
    overrides = [
        ("rollout.engine.nonsense=1",),
        ("rollout={name: vllm, engine: {url: 'http://a'}}",),
        ("reward.judges=[{kind: model, options: {path: model}}]", "weights.carrier=gloo"),
        ("reward.functions=[{name: math}, {name: format}]", "actor.use_kl_loss=true"),
    ]
    code = f"""
import sys
from pathlib import Path
from meshrl.config import load_recipe
from meshrl.contract.errors import ConfigError
for overrides in {overrides!r}:
    try:
        load_recipe(Path("my.yaml"), overrides)
    except ConfigError:
        pass
print([name for name in ("torch", "transformers", "grpc") if name in sys.modules])
"""
    Path("train.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_what_is_assumed_of_another_machine_is_said_line_by_line() -> None:
    assumed = Assumptions.model_validate(
        {
            "gpus": 8,
            "packages": {"vllm": True, "wandb": False},
            "programs": {"vllm": True},
            "models": {"/models/big": QWEN},
            "rows": {"/data/a.parquet": [{"prompt": "?"}]},
            "files": {"/data/reward.py": "a\nb\n"},
        }
    )
    assert list(assumed.lines()) == [
        "8 GPUs",
        "the package vllm is installed",
        "the package wandb is not installed",
        "the program vllm is there",
        "/models/big is a checkpoint of Qwen2ForCausalLM with weights and tokenizer",
        "/data/a.parquet begins with 1 given rows",
        "/data/reward.py is a file of 2 given lines",
    ]


def test_a_recipe_of_another_machine_is_checked_against_what_is_assumed() -> None:
    theirs = Assumptions.model_validate(
        {
            "gpus": 8,
            "packages": {"vllm": True, "cupy": True},
            "models": {"/models/big": QWEN},
            "rows": {"/data/a.parquet": [{"prompt": "?", "answer": "!"}]},
        }
    )
    overrides = [
        "model.path=/models/big",
        "data.train_files=[/data/a.parquet]",
        "rollout.name=vllm",
        "weights.carrier=nccl",
        "trainer.device=cuda",
        "trainer.nproc=8",
        "placement.machines={there: 8, and-there: 8}",
    ]
    load_recipe(Path("my.yaml"), overrides, machine=AssumedMachine(theirs))
    with pytest.raises(ConfigError, match=r"no such directory: /models/big"):
        load_recipe(Path("my.yaml"), overrides, machine=ThisMachine())
