"""Steps on rows with pictures by two or four ranks, beside the same by one: run as a program by test_vision."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from meshrl.trainer.config import ParallelConfig
from meshrl.trainer.distributed import World

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.doubles.equality import TRAININGS, differences, train

LAYOUTS: dict[int, list[dict[str, int]]] = {
    2: [{"data_shard": 2}, {"data_replicate": 2}, {"sequence": 2}],
    4: [{"data_replicate": 2, "data_shard": 2}],
}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    first = World.start("cpu")
    wanted = torch.load(folder / "alone.pt")
    for layout in LAYOUTS[first.size]:
        world = World.start("cpu", ParallelConfig.model_validate(layout))
        found = differences(train(folder / "model", world, TRAININGS["AdamW"]), wanted)
        if world.is_main:
            with (folder / "found").open("a") as file:
                file.write(json.dumps([layout, found]) + "\n")
    first.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
