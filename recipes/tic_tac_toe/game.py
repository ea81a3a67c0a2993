"""Tic-tac-toe of the policy against itself, or against random moves where a row names the policy's side."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

from meshrl.rollout.programs.seats import Episode
from meshrl.rollout.programs.user import EndedError

LINES = ("012", "345", "678", "036", "147", "258", "048", "246")
WIN, DRAW, LOSS, WRONG = 1.0, 0.5, 0.0, -0.5


def winner(board: str) -> str:
    """The player with three in a line; `-` for a draw, empty while the game is not over."""
    for line in LINES:
        marks = {board[int(cell)] for cell in line}
        if len(marks) == 1 and marks != {"."}:
            return marks.pop()
    return "" if "." in board else "-"


def moved(board: str, cell: int, mark: str) -> str:
    """The board after a move."""
    return f"{board[:cell]}{mark}{board[cell + 1 :]}"


def to_move(board: str) -> str:
    """The side whose turn it is: x begins."""
    return "x" if board.count("x") == board.count("o") else "o"


def legal(board: str) -> list[int]:
    """Empty cells."""
    return [cell for cell, mark in enumerate(board) if mark == "."]


def drawn(episode: Episode) -> Callable[[str], int]:
    """A player of random moves, the same for the same row."""
    draw = random.Random(zlib.crc32(str(episode.uid).encode()))
    return lambda board: draw.choice(legal(board))


async def play(episode: Episode) -> dict[str, float]:
    """One game from the row's opening. Who names no empty cell loses more than a game; the other draws."""
    given = episode.task.extra_info
    board, policy = given["board"], given.get("policy", "xo")
    opponent = drawn(episode)
    while not (won := winner(board)):
        mark = to_move(board)
        if mark not in policy:
            board = moved(board, opponent(board), mark)
            continue
        try:
            said = await episode.seat(mark).say(f"{mark}{board}")
        except EndedError:
            said = ""
        cell = "abcdefghi".find(said) if len(said) == 1 else -1
        if cell not in legal(board):
            scores = {side: WRONG if side == mark else DRAW for side in policy}
            return told(scores, wrong=True)
        board = moved(board, cell, mark)
    scores = {side: DRAW if won == "-" else WIN if won == side else LOSS for side in policy}
    return told(scores, wrong=False)


def told(scores: dict[str, float], *, wrong: bool) -> dict[str, float]:
    """The rewards of the policy's sides; and against random moves whether the game was not lost."""
    if len(scores) > 1:
        return {**scores, "wrong": float(wrong)}
    (score,) = scores.values()
    return {**scores, "wrong": float(wrong), "not_lost": float(score >= DRAW)}
