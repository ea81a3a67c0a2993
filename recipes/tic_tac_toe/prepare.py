"""Openings of tic-tac-toe, and a tiny model that knows good moves and mostly makes any.

python recipes/tic_tac_toe/prepare.py runs/tic_tac_toe/assets
"""

from __future__ import annotations

import argparse
import functools
import random
import zlib
from pathlib import Path

from game import legal, moved, to_move, winner

from meshrl.cli.demo.tiny_model import chat_tokenizer
from meshrl.cli.demo.warm_start import Stage, warm_start, write_rows

CELLS = "abcdefghi"
GAMES, HELD_OUT_SHARE = 2500, 5
KNOWING_SHARE = 0.3
"""The share of moves that the last stage shows; the others are drawn."""


def openings() -> tuple[list[str], list[str]]:
    """Boards after up to three moves to train on; and others."""
    boards = ["." * 9]
    for board in boards:
        if board.count(".") > 6:
            boards += [moved(board, cell, to_move(board)) for cell in legal(board)]
    boards = list(dict.fromkeys(boards))
    held = [b for b in boards if zlib.crc32(b.encode()) % HELD_OUT_SHARE == 0]
    return [b for b in boards if b not in held], held


@functools.cache
def value(board: str, side: str) -> int:
    """The best that `side` can still get: 1 a game won, 0 a draw, -1 a game lost."""
    if won := winner(board):
        return 0 if won == "-" else 1 if won == side else -1
    mark = to_move(board)
    values = [value(moved(board, cell, mark), side) for cell in legal(board)]
    return max(values) if mark == side else min(values)


def best(board: str) -> int:
    """The first of the best moves; of those, one that wins at once."""
    mark = to_move(board)
    after = {cell: moved(board, cell, mark) for cell in legal(board)}
    return max(after, key=lambda cell: (value(after[cell], mark), winner(after[cell]) == mark))


def game(opening: str, draw: random.Random, knowing: float) -> dict[str, list[dict[str, str]]]:
    """One side's game as a conversation: with `knowing` the best moves, else any; its opponent's moves are drawn."""
    board, side, messages = opening, draw.choice("xo"), []
    while not winner(board):
        mark, cells = to_move(board), legal(board)
        cell = draw.choice(cells)
        if mark == side:
            cell = best(board) if draw.random() < knowing else cell
            messages.append({"role": "user", "content": f"{mark}{board}"})
            messages.append({"role": "assistant", "content": CELLS[cell]})
        board = moved(board, cell, mark)
    return {"messages": messages}


def stages(boards: list[str], seed: int) -> list[Stage]:
    """Good moves, then mostly any."""
    draw = random.Random(seed)
    good, mixed = (
        [game(draw.choice(boards), draw, knowing) for _ in range(GAMES)]
        for knowing in (1.0, KNOWING_SHARE)
    )
    return [
        Stage(name="good moves", rows=good, steps=200, lr=3e-3, seed=seed),
        Stage(name="mostly any", rows=mixed, steps=60, lr=1e-3, seed=seed),
    ]


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    train, held_out = openings()
    games = [{"board": board} for board in train]
    sides = [{"board": board, "policy": side} for board in held_out for side in "xoxo"]
    for name, infos in (("train", games), ("held_out", sides)):
        rows = [
            {"prompt": [{"role": "user", "content": info["board"]}], "extra_info": info}
            for info in infos
        ]
        write_rows(options.directory / f"{name}.jsonl", rows)
    draw = random.Random(options.seed)
    measured = [game(board, draw, 1.0) for board in held_out]
    warm_start(
        options.directory,
        stages(train, options.seed),
        measured,
        seed=options.seed,
        report=lambda name, now: print(
            f"{name}: step {now.step}, loss {now.loss:.3f}, exact {now.exact_match}", flush=True
        ),
        tokenizer=chat_tokenizer([*"xo.", *CELLS]),
    )


if __name__ == "__main__":
    main()
