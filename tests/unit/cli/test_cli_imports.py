"""A person who asks a small question does not wait for torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ...small_checkpoint import write_tokenizer, write_weights

RECIPE = """
model: {path: model}
data: {train_files: [train.jsonl]}
reward: {custom_reward_function: {path: mine.py}}
"""
SHOW = """
import sys
from meshrl.cli import main
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as ended:
        code = ended.code
    print("\\nHEAVY", line, code, sorted({"torch", "transformers", "pyarrow"} & sys.modules.keys()))
"""
COMMANDS = (
    "--help",
    "up --help",
    "serve --help",
    "dpo --help",
    "data check --help",
    "config explain rollout.n",
    "config from-verl -- rollout.n=2",
    "config check my.yaml",
    "config show my.yaml",
)


def write_checked(tmp_path: Path) -> None:
    """A recipe that is good, with what it names."""
    (tmp_path / "my.yaml").write_text(RECIPE)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    (tmp_path / "mine.py").write_text("def compute_score(**sample):\n    return 0.0\n")
    (tmp_path / "model").mkdir()
    config = '{"architectures": ["LlamaForCausalLM"]}'
    (tmp_path / "model" / "config.json").write_text(config)
    write_tokenizer(tmp_path / "model")
    write_weights(tmp_path / "model" / "model.safetensors")


def test_neither_help_nor_config_imports_torch(tmp_path: Path) -> None:
    """All in one process: the first that does is the first line that differs."""
    write_checked(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SHOW, *COMMANDS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("HEAVY")]
    assert said == [f"HEAVY {line} 0 []" for line in COMMANDS], done.stdout + done.stderr


WITHOUT = """
import sys
from importlib.machinery import PathFinder
gone = {"torch", "transformers", "tokenizers", "safetensors", "peft", "pyarrow", "matplotlib", "jinja2"}
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *more: None if name.partition(".")[0] in gone else find(name, *more)
)
from meshrl.cli import main
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as ended:
        print("\\nCODE", ended.code, flush=True)
"""
INSTALL = "pip install 'meshrl[torch]'"
LACKING = {
    "data check my.yaml": f"error: this needs tokenizers, which is not installed: {INSTALL}",
    "data stats my.yaml": f"error: this needs tokenizers, which is not installed: {INSTALL}",
    "data show my.yaml": f"error: this needs tokenizers, which is not installed: {INSTALL}",
    "config check my.yaml": f"error: my.yaml:2: model: this needs torch, transformers: {INSTALL}",
    "up my.yaml": f"error: my.yaml:2: model: this needs torch, transformers: {INSTALL}",
    "eval my.yaml": f"error: my.yaml:2: model: this needs torch, transformers: {INSTALL}",
    "serve trainer my.yaml": f"error: my.yaml:2: model: this needs torch, transformers: {INSTALL}",
    "sft sft.yaml": f"error: this needs torch, which is not installed: {INSTALL}",
    "demo": f"error: this needs torch, which is not installed: {INSTALL}",
}
"""Commands that read or train a model, and what each says where the packages for it are not installed."""


def test_a_command_names_the_extra_that_it_lacks_in_one_line(tmp_path: Path) -> None:
    write_checked(tmp_path)
    (tmp_path / "sft.yaml").write_text(
        "model: {path: model}\ntrain_files: [train.jsonl]\nresponse_key: answer\noutput_dir: out\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *LACKING], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr.splitlines() == list(LACKING.values())
    assert done.stdout.count("CODE 2") == len(LACKING)
