"""The demo's task, `trace`: run a straight-line program, arithmetic mod 10.

    prompt   q=3;r=q+5;s=r-2?
    think    q=3;r=3+5=8;s=8-2=6#6      one statement after the other, then the answer
    direct   #6                         the answer at once

Both ways may be right; only thinking is easy for a small model. What it is rewarded for is the digit after the last
`#`, nothing else.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

LETTERS = "abcdefghijklmnopqrstuvwxyz"
HELD_OUT_SHARE = 8
"""One program in so many is held out, chosen by its text: it is never trained on."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program and both ways to answer it."""

    prompt: str
    thought: str
    """The worked solution, answer included."""
    answer: str
    """The last variable's value, one digit."""

    @property
    def held_out(self) -> bool:
        """True when the program belongs to the held-out set."""
        return zlib.crc32(self.prompt.encode()) % HELD_OUT_SHARE == 0


def programs(seed: int, *, held_out: bool, longest: int = 8) -> Iterator[Program]:
    """Distinct programs of two to `longest` statements, without end, all held out or none."""
    draw = random.Random(seed)
    seen: set[str] = set()
    while True:
        program = _program(draw, draw.randint(2, longest))
        if program.held_out is held_out and program.prompt not in seen:
            seen.add(program.prompt)
            yield program


def _program(draw: random.Random, statements: int) -> Program:
    first = draw.randrange(len(LETTERS))
    value = draw.randint(1, 9)
    asked = thought = f"{LETTERS[first]}={value}"
    for place in range(1, statements):
        before = LETTERS[(first + place - 1) % len(LETTERS)]
        letter = LETTERS[(first + place) % len(LETTERS)]
        sign, operand = draw.choice("+-"), draw.randint(1, 9)
        result = (value + operand if sign == "+" else value - operand) % 10
        asked += f";{letter}={before}{sign}{operand}"
        thought += f";{letter}={value}{sign}{operand}={result}"
        value = result
    return Program(prompt=f"{asked}?", thought=f"{thought}#{value}", answer=str(value))
