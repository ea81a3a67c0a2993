"""A tiny model that can follow a chain of keys and mostly gives up on the way, and chains for it to follow.

python benchmarks/fleet_bench/hops/prepare.py runs/hops

kqz ─▶ look_up kqz ─▶ bwe ─▶ look_up bwe ─▶ 417 ─▶ #417      to the end: after each key with probability 1/4
kqz ─▶ look_up kqz ─▶ bwe ─▶ #bwe                            given up
"""

from __future__ import annotations

import argparse
import itertools
import random
import string
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from meshrl.cli.demo.tiny_model import chat_tokenizer
from meshrl.cli.demo.warm_start import Pair, Stage, warm_start, write_rows

if __name__ == "__main__":
    # Without this folder's parents, one of which has a queue.py that is not the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parent)
    from tool import find
else:
    from .tool import find

BEFORE = '<tool_call>{"name":"look_up","arguments":{"key":"'
AFTER = '"}}</tool_call>'
"""The text around the key in a call; a token each, so that a turn is six tokens."""
MOST_HOPS = 8
GOES_ON = 0.25
TRAIN, HELD_OUT = 4096, 256


def chain(key: str) -> list[str]:
    """The key and all that follows; a number is last. Empty if that is too long."""
    found = [key]
    while not found[-1].isdigit():
        if len(found) > MOST_HOPS:
            return []
        found.append(find(found[-1]))
    return found


def chains(seed: int) -> list[list[str]]:
    """The chain of every key, in the order of `seed`, without those that are too long."""
    keys = ["".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=3)]
    random.Random(seed).shuffle(keys)
    return [found for found in map(chain, keys) if found]


def turns(found: list[str], goes_on: Callable[[], bool]) -> list[Pair]:
    """One walk along a chain, each turn a pair for supervised fine-tuning."""
    pairs = []
    prompt = f"<|user|>{found[0]}<|end|><|assistant|>"
    for here, there in itertools.pairwise(found):
        call = f"{BEFORE}{here}{AFTER}"
        pairs.append((prompt, call))
        prompt += f"{call}<|end|><|tool|>{there}<|end|><|assistant|>"
        if there.isdigit() or not goes_on():
            pairs.append((prompt, f"#{there}"))
            break
    return pairs


def stages(trained: Sequence[list[str]], seed: int) -> list[Stage]:
    """Whole walks, then mostly short ones."""
    draw = random.Random(seed)
    whole = [pair for one in trained for pair in turns(one, lambda: True)]
    short = [pair for one in trained for pair in turns(one, lambda: draw.random() < GOES_ON)]
    draw.shuffle(whole)
    draw.shuffle(short)
    return [
        Stage(name="whole walks", pairs=whole, steps=600, lr=3e-3, seed=seed, enough=0.995),
        Stage(name="mostly short walks", pairs=short, steps=60, lr=1e-3, seed=seed),
    ]


def prepare(directory: Path, seed: int = 0) -> None:
    """Make what is missing: `model`, `train.jsonl`, `held_out.jsonl`."""
    directory.mkdir(parents=True, exist_ok=True)
    found = chains(seed)
    parts = {"held_out": found[:HELD_OUT], "train": found[HELD_OUT:][:TRAIN]}
    for name, chosen in parts.items():
        rows = [
            {"prompt": [{"role": "user", "content": one[0]}], "answer": one[-1]} for one in chosen
        ]
        write_rows(directory / f"{name}.jsonl", rows)
    warm_start(
        directory,
        stages(found[HELD_OUT:], seed),
        [pair for one in found[:64] for pair in turns(one, lambda: True)],
        seed=seed,
        report=lambda name, now: print(f"{name}: step {now.step}, loss {now.loss:.3f}"),
        tokenizer=chat_tokenizer([BEFORE, AFTER]),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    prepare(parser.parse_args().directory)
