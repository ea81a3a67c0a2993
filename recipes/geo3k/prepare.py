r"""Geometry3K's parquet files as verl's rows, with the instruction that its reward looks for.

    python recipes/geo3k/prepare.py PATH/TO/geometry3k data/geo3k

reads the files of the data set hiyouga/geometry3k (`data/train-*.parquet`, `data/test-*.parquet`: `images`, `problem`
with `<image>` at its place, `answer`) and writes train.parquet and test.parquet.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet

INSTRUCTION = "Put your reasoning between <think> and </think>, and after it the final answer, alone, into \\boxed{}."


def verl_row(split: str, index: int, row: dict[str, Any]) -> dict[str, Any]:
    """One prompt in verl's schema."""
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": f"{row['problem']} {INSTRUCTION}"}],
        "images": row["images"],
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"split": split, "index": index},
    }


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    asked = parser.parse_args()
    asked.target.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        files = sorted(asked.source.rglob(f"{split}-*.parquet"))
        if not files:
            sys.exit(f"error: {asked.source}: no {split}-*.parquet below it")
        rows = [row for file in files for row in parquet.read_table(file).to_pylist()]
        table = pyarrow.Table.from_pylist([verl_row(split, *each) for each in enumerate(rows)])
        parquet.write_table(table, asked.target / f"{split}.parquet")
        print(f"{asked.target / split}.parquet: {len(rows)} rows")


if __name__ == "__main__":
    main()
