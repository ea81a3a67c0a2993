"""gymnasium's FrozenLake as a conversation: the policy reads the board and says one letter a turn."""

from __future__ import annotations

from typing import Any

import gymnasium

from meshrl.rollout.programs.user import EndedError, Session

SIZE = 4
ACTIONS = "ldru"
"""Left, down, right, up, as gymnasium numbers them."""


def lake(board: str) -> Any:
    """The environment at its start; `board` has a letter a cell, row by row."""
    desc = [board[at : at + SIZE] for at in range(0, SIZE * SIZE, SIZE)]
    env = gymnasium.make("FrozenLake-v1", desc=desc, is_slippery=False, max_episode_steps=12)
    env.reset(seed=0)
    return env


def shown(board: str, at: int) -> str:
    """The board with the walker on it."""
    return f"{board[:at]}@{board[at + 1 :]}"


async def play(session: Session) -> dict[str, float]:
    """One episode; its reward is 1 at the goal."""
    board = session.task.extra_info["board"]
    env, score, moves, wrong = lake(board), 0.0, 0.0, 0.0
    try:
        said = await session.reply()  # to the board, which is the prompt
        while True:
            action = ACTIONS.find(said) if len(said) == 1 else -1
            at = env.unwrapped.s
            wrong += action < 0
            if action >= 0:
                at, reward, terminated, truncated, _ = env.step(action)
                score, moves = score + float(reward), moves + 1
                if terminated or truncated:
                    break
            said = await session.say(shown(board, at))  # observed, not trained on
    except EndedError:
        pass  # no turn or no token is left
    return {"score": score, "moves": moves, "wrong": wrong}
