"""What the demo trains: programs to trace, and a model that has seen both ways to answer and prefers the wrong one.

random weights ──sft: worked solutions──▶ can think ──sft: mostly bare answers──▶ mostly does not
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshrl.services.demo.tiny_model import write_tiny_model
from meshrl.services.demo.trace import Program, programs

if TYPE_CHECKING:
    from meshrl.trainer.sft import SftProgress

HELD_OUT = 256
SFT_ROWS = 12_800
RL_PROMPTS = 4_096
THINKING_SHARE = 0.25
"""Of the second fine-tuning's rows; the rest answer at once."""


@dataclass(frozen=True, slots=True)
class Assets:
    """Where the demo's files lie."""

    directory: Path

    @property
    def model(self) -> Path:
        """The warm-started checkpoint that RL begins with."""
        return self.directory / "model"

    @property
    def train(self) -> Path:
        """Prompts for RL."""
        return self.directory / "train.jsonl"

    @property
    def held_out(self) -> Path:
        """Prompts never trained on."""
        return self.directory / "held_out.jsonl"


def prepare(directory: Path, *, seed: int, report: Callable[[str, SftProgress], None]) -> Assets:
    """Make what is missing under `directory`; a finished warm start is kept."""
    assets = Assets(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _write_prompts(assets.train, itertools.islice(programs(seed, held_out=False), RL_PROMPTS))
    held_out = list(itertools.islice(programs(seed + 1, held_out=True), HELD_OUT))
    _write_prompts(assets.held_out, held_out)
    if not (assets.model / "config.json").exists():
        _warm_start(assets, held_out, seed, report)
    return assets


def _warm_start(
    assets: Assets,
    held_out: Sequence[Program],
    seed: int,
    report: Callable[[str, SftProgress], None],
) -> None:
    # Imported here: with it comes torch, and `meshrl demo --help` should answer at once.
    from meshrl.trainer import sft
    from meshrl.trainer.config import ModelConfig, OptimConfig
    from meshrl.trainer.offline_config import SftConfig

    directory = assets.directory
    rows = list(itertools.islice(programs(seed + 2, held_out=False), SFT_ROWS))
    draw = random.Random(seed)
    bare = [(row.prompt, f"#{row.answer}") for row in rows]
    thought = [(row.prompt, row.thought) for row in rows]
    mixed = [t if draw.random() < THINKING_SHARE else b for t, b in zip(thought, bare, strict=True)]
    worked, mixture = directory / "sft_worked.jsonl", directory / "sft_mixture.jsonl"
    measured = directory / "sft_held_out.jsonl"
    _write_pairs(worked, thought)
    _write_pairs(mixture, mixed)
    _write_pairs(measured, [(row.prompt, row.thought) for row in held_out])
    random_weights, thinker, unfinished = (directory / n for n in ("random", "thinker", "sft"))
    write_tiny_model(random_weights, seed=seed)
    # Muon reaches a thinking model about three times sooner than AdamW alone.
    optim = OptimConfig(name="muon", lr=3e-3, lr_warmup_steps=10, weight_decay=0.0)
    sft.run(
        SftConfig(
            model=ModelConfig(path=random_weights),
            train_files=[worked],
            val_files=[measured],
            output_dir=thinker,
            steps=500,
            target_exact_match=0.85,
            test_freq=25,
            optim=optim,
            device="cpu",
            seed=seed,
        ),
        lambda progress: report("worked solutions", progress),
    )
    sft.run(
        SftConfig(
            model=ModelConfig(path=thinker),
            train_files=[mixture],
            output_dir=unfinished,
            steps=60,
            optim=optim.model_copy(update={"lr": 1e-3}),
            device="cpu",
            seed=seed + 1,
        ),
        lambda progress: report("mostly bare answers", progress),
    )
    # Under its final name only when complete: a demo that was interrupted here starts the warm start again.
    shutil.rmtree(assets.model, ignore_errors=True)
    unfinished.rename(assets.model)


def _write_prompts(path: Path, rows: Iterable[Program]) -> None:
    _write(path, ({"prompt": row.prompt, "answer": row.answer} for row in rows))


def _write_pairs(path: Path, pairs: Iterable[tuple[str, str]]) -> None:
    _write(path, ({"prompt": prompt, "response": response} for prompt, response in pairs))


def _write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
