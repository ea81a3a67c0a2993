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
from meshrl.cli.demo.warm_start import Stage, warm_start, write_rows

LAKES, HELD_OUT, HELD_OUT_SHARE = 1200, 128, 6
MOVES = 12
KNOWING_SHARE = 0.3
"""The share of moves that the last stage shows; the others are drawn."""


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
    """Moves to the goal over ice, by cell."""
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


def episode(board: str, draw: random.Random, knowing: float) -> dict[str, list[dict[str, str]]]:
    """A walk as a conversation: along the shortest way, with 1 - `knowing` a move in any direction instead."""
    away, at, messages = steps_to_goal(board), 0, []
    while board[at] not in "HG" and len(messages) < 2 * MOVES:
        best = min(range(4), key=lambda action: away.get(moved(at, action), 99))
        action = best if draw.random() < knowing else draw.randrange(4)
        messages.append({"role": "user", "content": shown(board, at)})
        messages.append({"role": "assistant", "content": ACTIONS[action]})
        at = moved(at, action)
    return {"messages": messages}


def stages(boards: list[str], seed: int) -> list[Stage]:
    """The way, then mostly any way."""
    draw = random.Random(seed)
    ways, walks = (
        [episode(board, draw, knowing) for board in boards] for knowing in (1.0, KNOWING_SHARE)
    )
    return [
        Stage(name="ways", rows=ways, steps=300, lr=3e-3, seed=seed, enough=0.9),
        Stage(name="mostly walks", rows=walks, steps=60, lr=1e-3, seed=seed),
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
    measured = [episode(board, draw, 1.0) for board in held_out]
    warm_start(
        options.directory,
        stages(train, options.seed),
        measured,
        seed=options.seed,
        report=lambda name, now: print(
            f"{name}: step {now.step}, loss {now.loss:.3f}, exact {now.exact_match}"
        ),
        tokenizer=chat_tokenizer([*"SFHG@", *ACTIONS]),
    )


if __name__ == "__main__":
    main()
