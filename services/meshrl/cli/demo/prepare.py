"""The demo's task, programs to trace, and its model: one that has seen both ways to answer and prefers the wrong one.

random weights ──sft: worked solutions──▶ can think ──sft: mostly bare answers──▶ mostly does not
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrl.cli.demo.tiny_model import PLAIN
from meshrl.cli.demo.warm_start import Stage, warm_start, write_rows

if TYPE_CHECKING:
    from meshrl.trainer.offline.loop import OfflineProgress


LETTERS = "abcdefghijklmnopqrstuvwxyz"
HELD_OUT_SHARE = 8
"""One program in HELD_OUT_SHARE is held out, chosen by its text, and never trained on."""


@dataclass(frozen=True, slots=True)
class TraceProgram:
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


def programs(seed: int, *, held_out: bool, longest: int = 8) -> Iterator[TraceProgram]:
    """Distinct programs of two to `longest` statements, without end, all held out or none."""
    draw = random.Random(seed)
    seen: set[str] = set()
    while True:
        program = _program(draw, draw.randint(2, longest))
        if program.held_out is held_out and program.prompt not in seen:
            seen.add(program.prompt)
            yield program


def _program(draw: random.Random, statements: int) -> TraceProgram:
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
    return TraceProgram(prompt=f"{asked}?", thought=f"{thought}#{value}", answer=str(value))


HELD_OUT = 256
SFT_ROWS = 12_800
RL_PROMPTS = 4_096
THINKING_SHARE = 0.25
"""Share of the second fine-tuning's rows that think; the rest answer at once."""


def prepare(
    directory: Path,
    *,
    seed: int,
    report: Callable[[str, OfflineProgress], None],
    kind: Mapping[str, Any] = PLAIN,
) -> None:
    """Make what is missing under `directory`: train.jsonl, held_out.jsonl and `model`; a finished warm start is kept.

    `kind` is as for `write_tiny_model`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _write_prompts(
        directory / "train.jsonl", itertools.islice(programs(seed, held_out=False), RL_PROMPTS)
    )
    held_out = list(itertools.islice(programs(seed + 1, held_out=True), HELD_OUT))
    _write_prompts(directory / "held_out.jsonl", held_out)
    measured = [(row.prompt, row.thought) for row in held_out]
    warm_start(directory, _stages(seed), measured, seed=seed, report=report, kind=kind)


def _stages(seed: int) -> list[Stage]:
    rows = list(itertools.islice(programs(seed + 2, held_out=False), SFT_ROWS))
    draw = random.Random(seed)
    bare = [(row.prompt, f"#{row.answer}") for row in rows]
    thought = [(row.prompt, row.thought) for row in rows]
    mixed = [t if draw.random() < THINKING_SHARE else b for t, b in zip(thought, bare, strict=True)]
    return [
        Stage(name="worked solutions", rows=thought, steps=500, lr=3e-3, seed=seed, enough=0.85),
        Stage(name="mostly bare answers", rows=mixed, steps=60, lr=1e-3, seed=seed + 1),
    ]


def _write_prompts(path: Path, rows: Iterable[TraceProgram]) -> None:
    write_rows(path, ({"prompt": row.prompt, "answer": row.answer} for row in rows))
