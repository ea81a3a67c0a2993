"""The demo's task for a tiny hybrid, a Qwen3.5: programs to trace, and a model that mostly answers at once.

python recipes/hybrid/prepare.py runs/hybrid/assets
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


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    prepare(
        options.directory,
        seed=options.seed,
        report=lambda name, now: print(f"{name}: step {now.step}, loss {now.loss:.3f}"),
        kind=HYBRID,
    )


if __name__ == "__main__":
    main()
