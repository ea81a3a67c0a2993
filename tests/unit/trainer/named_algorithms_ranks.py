"""One step of the named algorithms given, by however many ranks: run as a program by test_algorithms."""

from __future__ import annotations

import sys
from pathlib import Path

import named_algorithms
import torch

from meshrl.trainer.distributed import World


def main(model: Path, target: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    world = World.start("cpu")
    found = {}
    for name in names:
        recipe = named_algorithms.recipe_of(name, model, *named_algorithms.GRADIENTS)
        learner = named_algorithms.learner_of(recipe, world)
        named_algorithms.learn(learner, recipe, named_algorithms.trajectories(recipe, model))
        found[name] = named_algorithms.weights(learner)
    if world.is_main:
        torch.save(found, target)
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
