"""The loop of offline training: a batch that (seed, step) names, one step, held-out rows, checkpoints, export.

    newest checkpoint ──▶ step s ──▶ batch s ──▶ lesson.step ──┬─ every test_freq: lesson.evaluate
                             ▲                                 └─ every save_freq: a durable checkpoint
                             └──────────────────────────────────  the export appears by a rename

The order of rows is a function of the seed, the learning rate one of the step: a killed run that continues from
a checkpoint computes what it would have computed.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

import numpy as np

from meshrl.contract.errors import UserError
from meshrl.contract.types import Int32
from meshrl.trainer.checkpoint import checkpoint
from meshrl.trainer.checkpoint.checkpoint import TrainerState
from meshrl.trainer.learner.optimizer import Optimizers, learning_rate
from meshrl.trainer.model.policy import Policy
from meshrl.trainer.offline.config import OfflineConfig
from meshrl.trainer.ranks.world import World

log = logging.getLogger(__name__)
EXACT_MATCH = "val/exact_match"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineProgress:
    """Progress of offline training."""

    step: int
    steps: int
    numbers: Mapping[str, float]
    """Metrics of this step; those of held-out rows begin with `val/`."""
    tokens_per_s: float
    seconds: float

    @property
    def loss(self) -> float:
        """The loss of this step; nan before the first one."""
        return self.numbers.get("loss", math.nan)

    @property
    def exact_match(self) -> float | None:
        """Share of held-out rows whose whole response greedy decoding would give; None: not measured."""
        return self.numbers.get(EXACT_MATCH)


Report = Callable[[OfflineProgress], None]


class Lesson(Protocol):
    """Training on rows that are numbered from 0."""

    def step(self, rows: Sequence[int], rate: float) -> dict[str, float]:
        """One optimizer step; numbers with `tokens`, the same on every rank."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Numbers of the held-out rows, the same on every rank; none where there are none."""
        ...


def fit(
    lesson: Lesson,
    model: Policy,
    optimizers: Optimizers,
    config: OfflineConfig,
    world: World,
    *,
    kind: str,
    count: int,
    rows: Iterable[Int32],
    report: Report | None = None,
    enough: Callable[[Mapping[str, float]], bool] = lambda numbers: False,
) -> OfflineProgress:
    """Train from the newest checkpoint, or from the start, to the last step; every rank calls this.

    Args:
        lesson: Steps and evaluations.
        model: Content of checkpoints.
        optimizers: Its optimizer.
        config: How long, how often.
        world: The ranks.
        count: Training rows.
        kind: Names the training among others; a checkpoint of another kind is refused.
        rows: Their tokens; a checkpoint of other rows is refused.
        report: Called every ten steps and with each measurement, on rank 0; None logs a line.
        enough: Ends the training after a measurement.

    Raises:
        UserError: the checkpoint there is another training's.
    """
    start = TrainerState(
        run=f"{kind}-{_fingerprint(config, rows)}", step=0, epoch=0, seed=config.seed,
        world_size=world.size, kl_coef=0.0,
    )  # fmt: skip
    state = _resumed(start, model, optimizers, config, world)
    batches = islice(shuffled(count, config.batch_rows, config.seed), state.step, None)
    begin, tokens = time.monotonic(), 0.0
    progress = OfflineProgress(
        step=state.step, steps=config.steps, numbers={}, tokens_per_s=0, seconds=0
    )
    for step in range(state.step + 1, config.steps + 1):
        rate = learning_rate(config.optim, step - 1, config.steps)
        numbers = lesson.step(next(batches), rate)
        tokens += numbers.pop("tokens", 0.0)
        last = step == config.steps
        measured = lesson.evaluate() if last or step % config.test_freq == 0 else {}
        state = replace(state, step=step)
        if config.save_freq > 0 and (last or step % config.save_freq == 0):
            _save(model, optimizers, state, config, world)
        seconds = time.monotonic() - begin
        progress = OfflineProgress(
            step=step, steps=config.steps, numbers={**numbers, **measured},
            tokens_per_s=tokens / seconds, seconds=seconds,
        )  # fmt: skip
        if world.is_main and (measured or step % 10 == 0 or last):
            (report or _log)(progress)
        if measured and enough(measured):
            break
    return progress


def shuffled(count: int, batch_rows: int, seed: int) -> Iterator[list[int]]:
    """Batches of row indices, for ever: each epoch in an order of its own, batches running on across epochs."""
    draw = np.random.default_rng(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < batch_rows:
            waiting.extend(draw.permutation(count).tolist())
        yield waiting[:batch_rows]
        del waiting[:batch_rows]


def _fingerprint(config: OfflineConfig, rows: Iterable[Int32]) -> str:
    """Hash of data that must be unchanged on resume: rows, their order, the model's name."""
    digest = hashlib.blake2b(f"{config.batch_rows} {config.model.path}".encode(), digest_size=8)
    for row in rows:
        digest.update(row.tobytes() + b"|")
    return digest.hexdigest()


def _resumed(
    start: TrainerState,
    model: Policy,
    optimizers: Optimizers,
    config: OfflineConfig,
    world: World,
) -> TrainerState:
    root = config.checkpoint_dir
    newest = checkpoint.newest(root, world) if config.resume_mode == "auto" else None
    if newest is None:
        return start
    path, saved = newest
    if (saved.run, saved.seed) != (start.run, start.seed):
        raise UserError(
            f"{path} is of another training ({saved.run}, seed {saved.seed}; this is {start.run}, seed {start.seed}):"
            " put rows, batch_rows, model and seed back, give another output_dir, or set resume_mode=disable"
        )
    if saved.step > config.steps:
        raise UserError(f"{path} is of step {saved.step}, and steps is {config.steps}")
    log.info("resumed at step %d from %s", saved.step, path)
    return checkpoint.load(path, model, optimizers)


def _save(
    model: Policy, optimizers: Optimizers, state: TrainerState, config: OfflineConfig, world: World
) -> None:
    checkpoint.save(
        config.checkpoint_dir, model, optimizers, state, world, keep=config.max_ckpt_to_keep
    )


def _log(progress: OfflineProgress) -> None:
    numbers = "  ".join(f"{name} {value:.4f}" for name, value in progress.numbers.items())
    log.info("%d/%d  %s", progress.step, progress.steps, numbers)
