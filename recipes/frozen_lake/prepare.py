"""Lakes, and a tiny model that knows the shortest way over one and mostly walks about instead.

python recipes/frozen_lake/prepare.py runs/frozen_lake/assets
"""

from __future__ import annotations

import argparse
import random
import zlib
from collections import deque
from pathlib import Path

from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from lake import ACTIONS, SIZE, shown

from meshrl.cli.demo.tiny_model import chat_tokenizer
from meshrl.cli.demo.warm_start import Pair, Stage, warm_start, write_rows

LAKES, HELD_OUT, HELD_OUT_SHARE = 1200, 128, 6
KNOWING_SHARE = 0.3
"""Of the moves that the last stage shows; the others are drawn."""


def lakes() -> tuple[list[str], list[str]]:
    """Different boards to train on, and others."""
    boards = dict.fromkeys("".join(generate_random_map(SIZE, p=0.75, seed=n)) for n in range(LAKES))
    held = [b for b in boards if zlib.crc32(b.encode()) % HELD_OUT_SHARE == 0]
    return [b for b in boards if b not in held], held[:HELD_OUT]


def moved(at: int, action: int) -> int:
    """The cell after a move, as gymnasium numbers cells."""
    row, column = divmod(at, SIZE)
    row += (action == 1) - (action == 3)
    column += (action == 2) - (action == 0)
    inside = 0 <= row < SIZE and 0 <= column < SIZE
    return row * SIZE + column if inside else at


def steps_to_goal(board: str) -> dict[int, int]:
    """By cell: the moves that the goal is away, over ice."""
    found = {SIZE * SIZE - 1: 0}
    queue = deque(found)
    while queue:
        here = queue.popleft()
        for before in range(SIZE * SIZE):
            near = here in (moved(before, action) for action in range(4))
            if near and board[before] in "SF" and before not in found:
                found[before] = found[here] + 1
                queue.append(before)
    return found


def turns(board: str, draw: random.Random, knowing: float) -> list[Pair]:
    """An episode along the shortest way, with each turn as a pair; with 1 - `knowing` a turn shows any move."""
    away, at, said, pairs = steps_to_goal(board), 0, "", []
    while board[at] != "G":
        best = min(range(4), key=lambda action: away.get(moved(at, action), 99))
        said += f"<|user|>{shown(board, at)}<|end|><|assistant|>"
        pairs.append((said, ACTIONS[best if draw.random() < knowing else draw.randrange(4)]))
        said += f"{ACTIONS[best]}<|end|>"
        at = moved(at, best)
    return pairs


def stages(boards: list[str], seed: int) -> list[Stage]:
    """The way, then mostly any way."""
    draw = random.Random(seed)
    ways, walks = (
        [pair for board in boards for pair in turns(board, draw, knowing)]
        for knowing in (1.0, KNOWING_SHARE)
    )
    draw.shuffle(ways)
    draw.shuffle(walks)
    return [
        Stage(name="ways", pairs=ways, steps=500, lr=3e-3, seed=seed, enough=0.97),
        Stage(name="mostly walks", pairs=walks, steps=60, lr=1e-3, seed=seed),
    ]


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    train, held_out = lakes()
    for name, boards in (("train", train), ("held_out", held_out)):
        rows = [
            {
                "prompt": [{"role": "user", "content": shown(board, 0)}],
                "extra_info": {"board": board},
            }
            for board in boards
        ]
        write_rows(options.directory / f"{name}.jsonl", rows)
    draw = random.Random(options.seed)
    measured = [pair for board in held_out[:32] for pair in turns(board, draw, 1.0)]
    warm_start(
        options.directory,
        stages(train, options.seed),
        measured,
        seed=options.seed,
        report=lambda name, now: print(f"{name}: step {now.step}, loss {now.loss:.3f}"),
        tokenizer=chat_tokenizer([*"SFHG@", *ACTIONS]),
    )


if __name__ == "__main__":
    main()
