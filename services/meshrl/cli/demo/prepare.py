"""What the demo trains: programs to trace, and a model that has seen both ways to answer and prefers the wrong one.

random weights ──sft: worked solutions──▶ can think ──sft: mostly bare answers──▶ mostly does not
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from meshrl.cli.demo.trace import Program, programs
from meshrl.cli.demo.warm_start import Stage, warm_start, write_rows

if TYPE_CHECKING:
    from meshrl.trainer.offline.sft import SftProgress

HELD_OUT = 256
SFT_ROWS = 12_800
RL_PROMPTS = 4_096
THINKING_SHARE = 0.25
"""Of the second fine-tuning's rows; the rest answer at once."""


def prepare(
    directory: Path, *, seed: int, report: Callable[[str, SftProgress], None], experts: int = 0
) -> None:
    """Make what is missing under `directory`: train.jsonl, held_out.jsonl and `model`; a finished warm start is kept.

    `experts` is as for `write_tiny_model`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _write_prompts(
        directory / "train.jsonl", itertools.islice(programs(seed, held_out=False), RL_PROMPTS)
    )
    held_out = list(itertools.islice(programs(seed + 1, held_out=True), HELD_OUT))
    _write_prompts(directory / "held_out.jsonl", held_out)
    measured = [(row.prompt, row.thought) for row in held_out]
    warm_start(directory, _stages(seed), measured, seed=seed, report=report, experts=experts)


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


def _write_prompts(path: Path, rows: Iterable[Program]) -> None:
    write_rows(path, ({"prompt": row.prompt, "answer": row.answer} for row in rows))
