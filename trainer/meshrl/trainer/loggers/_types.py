"""Interface of loggers: the run and the rows that they get, and `Sink`.

The module of one has `open_logger`, from a `LoggedRun` to a `Sink`; it raises ImportError where a package is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from meshrl.common.files import replace_file
from meshrl.contract.types import Json

SAMPLES = 8
"""Rows of the best, and of the worst, in a table of samples."""
COLUMNS = ("uid", "prompt", "response", "reward", "advantage", "staleness", "length")
"""Columns of such a table."""
HISTOGRAMS = ("reward", "advantage", "length", "staleness", "mismatch")
"""Columns of the logged rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """The run that is logged."""

    directory: Path
    project: str
    name: str
    settings: Mapping[str, Json] = field(default_factory=dict)
    """The recipe, every key by its dotted path."""
    step: int = 0
    """Step at which it begins: a logger's later steps belong to a history that was discarded."""

    def kept_id(self, logger: str, made: str) -> str:
        """The id under which `logger` knows the run: the one of an earlier start, else `made`, which is kept."""
        path = self.directory / logger / "run-id"
        try:
            return path.read_text().strip() or made
        except OSError:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, made)
            return made


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRows:
    """Rows of a step, or of an evaluation."""

    split: str
    """`train` or `eval`."""
    samples: Sequence[Sequence[Json]]
    """The best and the worst, with the values of `COLUMNS`."""
    histograms: Mapping[str, npt.NDArray[np.float64]]
    """All finite values of a column, by its name."""


class Sink(Protocol):
    """An open logger. It may have `rows(step, LoggedRows)` too; calls come from two threads, one after the other."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of one step."""
        ...

    def close(self) -> None:
        """Flush."""
        ...


def flat(settings: Mapping[str, Json], prefix: str = "") -> dict[str, Json]:
    """Nested settings by dotted paths."""
    found: dict[str, Json] = {}
    for name, value in settings.items():
        inner = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return found


def rows_of(table: Any, split: str) -> LoggedRows:
    """Rows for loggers, from a `pyarrow.Table` of logged rows."""
    found = {}
    for name in HISTOGRAMS:
        values = np.array(table[name].to_pylist(), dtype=np.float64)
        values = values[np.isfinite(values)]
        if len(values):
            found[name] = values
    rows = table.select(list(COLUMNS)).to_pylist()
    scored = sorted((r for r in rows if r["reward"] is not None), key=lambda r: -r["reward"])
    chosen = scored if len(scored) <= 2 * SAMPLES else [*scored[:SAMPLES], *scored[-SAMPLES:]]
    return LoggedRows(
        split=split,
        samples=[[row[name] for name in COLUMNS] for row in chosen],
        histograms=found,
    )
