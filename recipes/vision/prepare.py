"""Makes a tiny random Qwen3-VL, pictures of coloured shapes, and rows for a short warm start by `meshrl sft`.

python recipes/vision/prepare.py runs/vision/assets

The warm start (sft.yaml) shows the model answers of which one in four is sure to be right, so it answers in the right
form, and little more often right than by chance: what it sees, it learns by RL.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from game import COLOURS, QUESTION, picture

from meshrl.testing.vision import random_checkpoint

RIGHT = 0.25
"""Share of the warm start's answers that are right for sure."""


def main() -> None:
    """Write everything below the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--warm-rows", type=int, default=1024)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    random_checkpoint("Qwen3VL", folder / "random")
    draws, number = random.Random(0), 0
    for name, count, made in (
        ("train", arguments.rows, row),
        ("held_out", arguments.held_out, row),
        ("warm_start", arguments.warm_rows, conversation),
    ):
        rows = [made(draws, number + each) for each in range(count)]
        number += count
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")


def row(draws: random.Random, number: int) -> dict[str, Any]:
    """A row in verl's form."""
    colour = draws.choice(tuple(COLOURS))
    return {
        "data_source": "colours",
        "prompt": [{"role": "user", "content": QUESTION}],
        "images": [{"bytes": picture(draws, colour), "path": None}],
        "reward_model": {"style": "rule", "ground_truth": colour},
        "extra_info": {"index": number},
    }


def conversation(draws: random.Random, number: int) -> dict[str, Any]:
    """A question about a picture, and an answer of the right form."""
    made = row(draws, number)
    colour = made["reward_model"]["ground_truth"]
    said = colour if draws.random() < RIGHT else draws.choice(tuple(COLOURS))
    answer = {"role": "assistant", "content": said}
    return {"messages": [*made["prompt"], answer], "images": made["images"]}


if __name__ == "__main__":
    main()
