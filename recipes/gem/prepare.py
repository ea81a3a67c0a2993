"""Games of GEM's GuessTheNumber, and a tiny model that knows how to halve a range and mostly guesses anything.

python recipes/gem/prepare.py runs/gem/assets
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path
from typing import Any

import gem

from meshrl.cli.demo.tiny_model import chat_tokenizer
from meshrl.cli.demo.warm_start import Stage, warm_start, write_rows

GAME = "game:GuessTheNumber-v0-easy"
LOWEST, HIGHEST = 1, 10
GAMES, HELD_OUT = 2000, 128
"""Seeds of games to show and to train on, and behind them those that are held out."""
HALVING_SHARE = 0.2
"""The share of guesses that the last stage shows; the others are any number."""
HINTS = (", you guessed ", ", and the target number is ", "higher", "lower", " than ", "At turn ")


def opened(seed: int) -> tuple[Any, str]:
    """A game and what it shows first."""
    env: Any = gem.make(GAME)
    seen, _ = env.reset(seed=seed)
    return env, seen


def episode(seed: int, draw: random.Random, halving: float) -> dict[str, list[dict[str, str]]]:
    """A game as a conversation: the middle of what is left, with 1 - `halving` any number instead."""
    env, seen = opened(seed)
    low, high, over, messages = LOWEST, HIGHEST, False, []
    while not over:
        middle = (low + high) // 2
        guess = middle if draw.random() < halving else draw.randint(LOWEST, HIGHEST)
        said = f"\\boxed{{{guess}}}"
        messages += [{"role": "user", "content": seen}, {"role": "assistant", "content": said}]
        seen, _, terminated, truncated, _ = env.step(said)
        over = terminated or truncated
        if "is higher" in seen:
            low = max(low, guess + 1)
        elif "is lower" in seen:
            high = min(high, guess - 1)
    return {"messages": messages}


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    seeds = {"train": range(GAMES), "held_out": range(GAMES, GAMES + HELD_OUT)}
    for name, games in seeds.items():
        rows = [
            {
                "prompt": [{"role": "user", "content": opened(seed)[1]}],
                "extra_info": {"env": GAME, "seed": seed},
            }
            for seed in games
        ]
        write_rows(options.directory / f"{name}.jsonl", rows)
    draw = random.Random(options.seed)
    halving, guessing = (
        [episode(seed, draw, share) for seed in seeds["train"]] for share in (1.0, HALVING_SHARE)
    )
    # A token for each part of the instructions: they are the same but for an example.
    instructions = re.split(r"\\boxed{\d*}", opened(0)[1])
    warm_start(
        options.directory,
        [
            Stage(name="halving", rows=halving, steps=300, lr=3e-3, seed=options.seed, enough=0.95),
            Stage(name="guessing", rows=guessing, steps=60, lr=1e-3, seed=options.seed),
        ],
        [episode(seed, draw, 1.0) for seed in seeds["held_out"]],
        seed=options.seed,
        report=lambda name, now: print(
            f"{name}: step {now.step}, loss {now.loss:.3f}, exact {now.exact_match}"
        ),
        tokenizer=chat_tokenizer([*instructions, *HINTS, "\\boxed{"]),
    )


if __name__ == "__main__":
    main()
