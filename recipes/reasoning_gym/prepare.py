"""A tiny model that has seen some answers to the tasks of tiny.yaml, and is right in about every eighth.

python recipes/reasoning_gym/prepare.py runs/reasoning_gym/assets
"""

from __future__ import annotations

import argparse
from pathlib import Path

from meshrl.cli.demo.warm_start import Stage, warm_start
from meshrl.config import load_recipe
from meshrl.trainer.data.reasoning_gym import gym_rows

OTHER_ROWS = 1_000_003
"""Between the seed of the recipe and that of the warm start."""
ENOUGH = 0.12
"""Exact match that ends the warm start: the rest is left to reinforcement learning."""


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    gym = load_recipe(Path(__file__).with_name("tiny.yaml"), check=False).data.reasoning_gym
    assert gym is not None
    kept_back = {row.values["prompt"] for row in gym_rows(gym, held_out=True)}
    other = gym.model_copy(update={"seed": gym.seed + OTHER_ROWS, "size": 20_000})
    pairs, held_out = (
        [
            (row.values["prompt"], row.values["answer"])
            for row in gym_rows(other, held_out=held)
            if row.values["prompt"] not in kept_back
        ]
        for held in (False, True)
    )
    warm_start(
        options.directory,
        [Stage(name="answers", pairs=pairs, steps=2000, lr=3e-3, seed=options.seed, enough=ENOUGH)],
        held_out[:96],
        seed=options.seed,
        report=lambda name, now: print(f"{name}: step {now.step}, loss {now.loss:.3f}"),
    )


if __name__ == "__main__":
    main()
