"""A bench whose weights say what they were made of, and a disk on which a process is killed at any of its writes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from meshrl.contract.errors import UserError
from meshrl.contract.types import (
    AdamStep,
    CreateModel,
    Json,
    Pass,
    TrainingResult,
    TrainingVerb,
)
from meshrl.trainer.hosted.bench import Bench, Model
from meshrl.trainer.hosted.storage import Disk

STATE = "state.json"


def chained(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


class StandInBench(Bench):
    """Passes whose loss setting is `wrong` are refused, those with `fails` break."""

    def __init__(self) -> None:
        self.made = 0
        self.done: list[tuple[str, TrainingVerb]] = []
        """Requests that were computed, each with its model."""

    def check(self, verb: TrainingVerb) -> None:
        if isinstance(verb, Pass) and "wrong" in verb.loss_settings:
            raise UserError("wrong it is")

    def create(self, verb: CreateModel) -> StandInModel:
        if verb.lora_rank == 13:
            raise UserError("rank 13 brings bad luck")
        self.made += 1
        return StandInModel(self, verb)


class StandInModel(Model):
    """Weights that are a hash of all that was done to them, in order."""

    def __init__(self, bench: StandInBench, verb: CreateModel) -> None:
        self.form: dict[str, Json] = {"lora_rank": verb.lora_rank}
        self.base = "base"
        self.weights, self.optimizer = chained(verb.lora_rank, verb.lora_seed), "new"
        self.waiting: list[str] = []
        self._bench = bench
        self._name = verb.base_model

    def _value(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        number = int(chained(self.weights, self.optimizer, self.waiting), 16)
        return np.array([number % 65521, len(self.waiting)], np.float32)

    def forward_backward(self, request: Pass) -> TrainingResult:
        self._bench.done.append((self._name, request))
        if "fails" in request.loss_settings:
            raise ZeroDivisionError("it fails")
        if request.backward:
            self.waiting.append(chained(sorted(request.loss_settings.items())))
        return TrainingResult(outputs=[{"logprobs": self._value()}])

    def step(self, request: AdamStep) -> TrainingResult:
        self._bench.done.append((self._name, request))
        waiting, self.waiting = self.waiting, []
        if not waiting or request.learning_rate == 13:
            raise UserError("no gradients wait, or bad ones")
        self.weights = chained(self.weights, waiting, request.learning_rate, self.optimizer)
        self.optimizer = chained(self.optimizer, waiting)
        return TrainingResult(metrics={"value": float(self._value()[0])})

    def drop_gradients(self) -> None:
        self.waiting = []

    def write(self, folder: Path) -> None:
        kept = {"weights": self.weights, "optimizer": self.optimizer, "waiting": self.waiting}
        (folder / STATE).write_text(json.dumps(kept))

    def read(self, folder: Path, *, with_optimizer: bool, with_gradients: bool = False) -> None:
        kept = json.loads((folder / STATE).read_text())
        self.weights = kept["weights"]
        self.optimizer = kept["optimizer"] if with_optimizer else "new"
        self.waiting = kept["waiting"] if with_gradients else []

    def export(self, folder: Path) -> None:
        (folder / "model").write_text(self.weights)

    def close(self) -> None:
        self._bench.made -= 1


class Killed(BaseException):
    """Ends the process: what runs on writes nothing more."""


class KillingDisk(Disk):
    """Writes until it is killed, at place `at`: before a write, in the middle, or after it when nobody knows."""

    pause_s = 0.0
    """How long an append takes."""

    def __init__(self, at: int | None = None, on_kill: Callable[[], None] = lambda: None) -> None:
        self.points = 0
        """How many places for a kill there were so far."""
        self._at, self._on_kill = at, on_kill
        self.killed = False

    def kill_after(self, points: int) -> None:
        self._at = self.points + points

    def _point(self) -> None:
        if self.killed:
            raise Killed
        if self._at is not None and self.points >= self._at:
            self.killed = True
            self._on_kill()
            raise Killed
        self.points += 1

    def append(self, path: Path, at: int, data: bytes) -> None:
        self._point()
        time.sleep(self.pause_s)
        try:
            self._point()
        except Killed:
            super().append(path, at, data[: len(data) // 2])
            raise
        super().append(path, at, data)
        self._point()

    def truncate(self, path: Path, size: int) -> None:
        self._point()
        super().truncate(path, size)
        self._point()

    def place(self, target: Path, facts: Mapping[str, Json], fill: Callable[[Path], None]) -> None:
        def filled(folder: Path) -> None:
            self._point()
            fill(folder)
            self._point()

        super().place(target, facts, filled)
        self._point()

    def make(self, folder: Path) -> None:
        self._point()
        super().make(folder)

    def remove(self, path: Path) -> None:
        self._point()
        super().remove(path)
        self._point()
