"""Rows of several turns: their tokenizer, a tool, and what must follow each turn, so that a wrong turn shows.

    turn ──text─┬▶ parse ──▶ look_up (a tool)     observed: what the tool says to this text
                └▶ replied (an agent)             observed: what the agent says to this text

What is observed after a turn depends on the turn's text alone. So a trained row shows whether another worker, an
answer that came twice or a branch of the conversation put something behind a turn that does not belong there.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import numpy as np
from typing_extensions import override

from meshrl.contract.types import Json, Trajectory
from meshrl.rollout import tokenizer
from meshrl.rollout.conversation import ChatMessage, appended
from meshrl.rollout.tools.ports import ToolCall
from tests.simulation.engine import STEP_BITS, TURN_TOKENS

TURN_END: Final = "."
"""The stop string of a turn; no token stands for it, and the engine ends a turn where it is asked for."""
TOOL: Final = "look_up"
MOST_TURNS: Final = 3
LONGEST_LOOK_UP_S: Final = 4.0


class Program(StrEnum):
    """The program that makes a task's trajectory: a module of `meshrl.rollout.programs`."""

    SINGLE_TURN = "single_turn"
    TOOLS = "tools"
    OPENAI = "openai"
    """Led by external agents, through the gateway."""


OPTIONS: Final[Mapping[Program, Mapping[str, object]]] = {
    Program.SINGLE_TURN: {},
    Program.TOOLS: {
        "tools": [f"{__name__}.{TOOL}"],
        "format": __name__,
        "max_turns": MOST_TURNS,
        "stop": [TURN_END],
    },
    Program.OPENAI: {"external": True},
}
"""`rollout.program_options`."""


class ChatTokenizer(tokenizer.ChatTokenizer):
    """A sampled token is its number in brackets, any other one a character."""

    @override
    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"<{token}>" if token >> STEP_BITS else chr(token) for token in ids)

    decode_all = decode

    @override
    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    @override
    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        tools: Sequence[Json] = (),
        generation: bool,
    ) -> str:
        lines = "".join(f"{each['role']}:{each['content']}\n" for each in messages)
        return lines + "assistant:" * generation

    @override
    def is_special(self, token: int) -> bool:
        return False


def parse(text: str) -> Sequence[ToolCall]:
    """The call in a turn: two turns of three have a call."""
    key = _number(text)
    return [ToolCall(name=TOOL, arguments={"key": key})] if key % 3 else []


async def look_up(key: int) -> str:
    """Look a number up.

    Args:
        key: The number.
    """
    await asyncio.sleep(key % 100 / 100 * LONGEST_LOOK_UP_S)
    return f"{key:x}"


def replied(text: str) -> str:
    """An agent's reply to an answer."""
    return f"{_number(text):x}"


def _number(text: str) -> int:
    return zlib.crc32(text.encode())


def score_of(answers: int) -> float:
    """An agent's posted score for a conversation with so many answers; a judge never gives it."""
    return 10.0 + answers


class CheckedConversations:
    """Checks of the trained rows of a program of several turns."""

    def __init__(self, program: Program, problem: Callable[[str], None]) -> None:
        """`problem` hears of what does not hold."""
        self.posted: dict[str, set[float]] = {}
        """Scores posted by agents, whether or not they got the answer, by uid."""
        self._program = program
        self._problem = problem
        self._tokenizer = ChatTokenizer()

    def __call__(self, row: Trajectory) -> None:
        """Look at one row that is trained on."""
        if self._program is Program.SINGLE_TURN:
            return
        turns = self._turns(row)
        for turn, observed in turns[:-1]:
            if observed != (wanted := self._after(turn)):
                self._problem(f"{row.uid}: {wanted!r} must follow a turn, and {observed!r} does")
        if not turns or turns[-1][1]:
            self._problem(f"{row.uid} does not end with a turn of the policy")
        if len(turns) > MOST_TURNS:
            self._problem(f"{row.uid} has {len(turns)} turns")
        if int(row.loss_mask.sum()) != TURN_TOKENS * len(turns):
            self._problem(f"{row.uid}: {int(row.loss_mask.sum())} tokens in {len(turns)} turns")
        if self._program is Program.OPENAI:
            self._check_reward(row, len(turns))

    def _check_reward(self, row: Trajectory, turns: int) -> None:
        if row.reward not in self.posted.get(str(row.uid), ()):
            self._problem(f"{row.uid} has reward {row.reward}, which no agent has posted")
        elif row.reward != score_of(turns):
            self._problem(f"{row.uid} has {turns} turns and the reward of others: {row.reward}")

    def _turns(self, row: Trajectory) -> list[tuple[str, str]]:
        """Each turn's text, and what was observed after it."""
        ends = np.flatnonzero(np.diff(row.loss_mask.astype(np.int8))) + 1
        parts = [self._text(part) for part in np.split(row.tokens, ends)][1:]
        return list(zip(parts[::2], [*parts[1::2], ""], strict=False))

    def _text(self, tokens: Any) -> str:
        return self._tokenizer.decode(tokens.tolist())

    def _after(self, turn: str) -> str:
        """The text between `turn` and the next turn."""
        if self._program is Program.OPENAI:
            message: ChatMessage = {"role": "user", "content": replied(turn)}
        else:
            message = {"role": "tool", "content": f"{_number(turn):x}"}
        return self._text(np.array(appended(self._tokenizer, [message], last=None)))
