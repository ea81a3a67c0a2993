"""The demo's task for a tiny mixture of experts: programs to trace, and a model that mostly answers at once.

python recipes/moe/prepare.py runs/moe/assets
"""

from __future__ import annotations

import argparse
from pathlib import Path

from meshrl.cli.demo.prepare import prepare

MIXTURE = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 144,
    "norm_topk_prob": True,
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
        kind=MIXTURE,
    )


if __name__ == "__main__":
    main()
