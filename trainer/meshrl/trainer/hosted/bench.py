"""Interface between what is journaled and what is computed: models on one base, and what their requests do."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from meshrl.contract.types import AdamStep, CreateModel, Json, Pass, TrainingResult, TrainingVerb


class Model(Protocol):
    """The weights of a model, and how they are trained. A UserError has changed nothing."""

    form: dict[str, Json]
    """Arguments of the `CreateModel` that makes another one of this form."""
    base: str | None
    """Fingerprint of the base model; None: it has none."""

    def forward_backward(self, request: Pass) -> TrainingResult:
        """Log-probs and loss; the gradients are added to those that wait. Nothing is changed by what it raises."""
        ...

    def step(self, request: AdamStep) -> TrainingResult:
        """An optimizer step; the gradients are gone, after a UserError too."""
        ...

    def drop_gradients(self) -> None:
        """None waits."""
        ...

    def write(self, folder: Path) -> None:
        """Weights, optimizer and gradients that wait, as files."""
        ...

    def read(self, folder: Path, *, with_optimizer: bool, with_gradients: bool = False) -> None:
        """Take over what `write` has written; gradients that waited are gone."""
        ...

    def export(self, folder: Path) -> None:
        """Write a checkpoint that engines load into the empty folder."""
        ...

    def close(self) -> None:
        """Free its memory."""
        ...


class Bench(Protocol):
    """Makes models on one base. All but `check` is called by one thread."""

    def check(self, verb: TrainingVerb) -> None:
        """Raises UserError for what is wrong whatever a model's state is."""
        ...

    def create(self, verb: CreateModel) -> Model:
        """A fresh model; `load_from` is the caller's to read. Raises UserError, BusyError."""
        ...
