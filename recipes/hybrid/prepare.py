"""The demo's task for a tiny hybrid, a Qwen3.5: programs to trace, and a model that mostly answers at once.

python recipes/hybrid/prepare.py runs/hybrid/assets [--for-vllm]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from meshrl.cli.demo.prepare import prepare

HYBRID = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 24,
}
FOR_VLLM = HYBRID | {
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""The heads that vLLM's kernels for a CPU want."""


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--for-vllm", action="store_true", help="heads as vLLM on a CPU wants them")
    options = parser.parse_args()
    prepare(
        options.directory,
        seed=options.seed,
        report=lambda name, now: print(f"{name}: step {now.step}, loss {now.loss:.3f}"),
        kind=FOR_VLLM if options.for_vllm else HYBRID,
    )


if __name__ == "__main__":
    main()
