"""A warm start: random weights, then supervised stages, each from what the one before it wrote."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from meshrl.cli.demo.tiny_model import PLAIN, write_tiny_model

if TYPE_CHECKING:
    from meshrl.trainer.offline.loop import OfflineProgress

Pair: TypeAlias = tuple[str, str]
"""A prompt and its response."""
Row: TypeAlias = Pair | Mapping[str, Any]
"""A pair, or a row as `meshrl sft` reads it: a whole conversation has `messages`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One supervised fine-tuning."""

    name: str
    """For `report`, and for its files."""
    rows: Sequence[Row]
    steps: int
    """At most."""
    lr: float
    seed: int
    """Seed of the order of its pairs."""
    enough: float | None = None
    """Exact match on held-out rows that ends it; None measures nothing and runs all steps."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread of torch, unless OMP_NUM_THREADS says more: on two busy cores 5,600 tokens/s, and 419 with all."""
    import torch

    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_one_thread()
def warm_start(
    directory: Path,
    stages: Sequence[Stage],
    held_out: Sequence[Row],
    *,
    seed: int,
    report: Callable[[str, OfflineProgress], None],
    kind: Mapping[str, Any] = PLAIN,
    tokenizer: Any = None,
) -> None:
    """Write `directory/model`, unless it is there: what the last stage made of a tiny model's random weights.

    Args:
        directory: Where the stages' rows and checkpoints go, too.
        stages: In their order.
        held_out: What a stage with `enough` is measured on.
        seed: Of the random weights.
        report: Called with a stage's name and its progress.
        kind: As for `write_tiny_model`.
        tokenizer: As for `write_tiny_model`.
    """
    # Imported here: with it comes torch, and `meshrl demo --help` should answer at once.
    from meshrl.trainer.config import ModelConfig
    from meshrl.trainer.learner.optimizer_config import OptimConfig
    from meshrl.trainer.offline import sft
    from meshrl.trainer.offline.config import SftConfig

    model = directory / "model"
    if (model / "config.json").exists():
        return
    start = directory / "random"
    write_tiny_model(start, seed=seed, kind=kind, tokenizer=tokenizer)
    measured = _write_sft(directory / "sft_held_out.jsonl", held_out)
    for stage in stages:
        end = directory / stage.name.replace(" ", "_")
        config = SftConfig(
            model=ModelConfig(path=start),
            train_files=[_write_sft(end.with_suffix(".jsonl"), stage.rows)],
            val_files=[] if stage.enough is None else [measured],
            output_dir=end,
            steps=stage.steps,
            target_exact_match=stage.enough,
            test_freq=25,
            # Muon gets there about three times sooner than AdamW alone.
            optim=OptimConfig(name="muon", lr=stage.lr, lr_warmup_steps=10, weight_decay=0.0),
            device="cpu",
            seed=stage.seed,
        )
        sft.run(config, partial(report, stage.name))
        start = end
    # Under its final name only when complete: what was interrupted begins anew.
    shutil.rmtree(model, ignore_errors=True)
    start.rename(model)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _write_sft(path: Path, rows: Iterable[Row]) -> Path:
    named = ({"prompt": r[0], "response": r[1]} if isinstance(r, tuple) else r for r in rows)
    return write_rows(path, named)
