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


def test_neither_help_nor_config_imports_torch(tmp_path: Path) -> None:
    """All in one process: the first that does is the first line that differs."""
    (tmp_path / "my.yaml").write_text(RECIPE)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    (tmp_path / "mine.py").write_text("def compute_score(**sample):\n    return 0.0\n")
    (tmp_path / "model").mkdir()
    config = '{"architectures": ["LlamaForCausalLM"]}'
    (tmp_path / "model" / "config.json").write_text(config)
    write_tokenizer(tmp_path / "model")
    write_weights(tmp_path / "model" / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", SHOW, *COMMANDS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("HEAVY")]
    assert said == [f"HEAVY {line} 0 []" for line in COMMANDS], done.stdout + done.stderr
