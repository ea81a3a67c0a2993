"""Writers of a run's metrics: metrics.jsonl always, and the loggers in `trainer.logger` (`loggers/`)."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshrl.common.line_file import LineFile
from meshrl.common.plugins import load
from meshrl.contract.errors import UserError
from meshrl.contract.types import Json
from meshrl.trainer.loggers._types import LoggedRun, Sink, rows_of
from meshrl.trainer.metrics.learning_signs import WATCHED, WINDOW, warnings_of

log = logging.getLogger(__name__)

LOGGERS = "meshrl.trainer.loggers"
STATM = Path("/proc/self/statm")
MAX_BYTES = 64 << 20
"""Most bytes of metrics.jsonl: some 25,000 steps."""


class MetricsLog:
    """Appends one JSON object per line to metrics.jsonl and hands them to other sinks.

    A line has `step` (the training step it tells of, from 1, or the last one before an evaluation) and its values;
    several lines may share a step (training, evaluation). What a killed trainer wrote after its last checkpoint
    tells of a history that is no more: `resume_at` drops it. At `max_bytes` every second line of the older half is
    left out: the file still tells of the whole run, of what is long ago in fewer steps. While the disk is full, lines
    wait in memory.
    """

    def __init__(
        self, path: Path, sinks: Sequence[Sink] = (), *, max_bytes: int = MAX_BYTES
    ) -> None:
        """Raises OSError: `path` cannot be opened."""
        self._path = path
        self._sinks = tuple(sinks)
        self._failed: list[Sink] = []
        self._turn = threading.Lock()
        """Lock of the sinks: metrics come from the event loop, rows from the thread that writes them."""
        self._max_bytes = self._thin_at = max_bytes
        self._refused = False
        self._file = LineFile(path)
        self._file.open()

    def resume_at(self, step: int) -> None:
        """Drop lines of steps and evaluations after `step` was made, and a last line that was cut short.

        Raises:
            OSError: the disk refuses; the file is as it was.
        """
        self._replace(
            [line for line in _from_1(self._lines()) if _step_of(line) < step + _is_training(line)]
        )

    def write(self, step: int, values: Mapping[str, Json]) -> None:
        """One line; values that are numbers go to the sinks too. Not-finite numbers become null in the file."""
        clean = {k: _clean(v) for k, v in values.items()}
        self._save(json.dumps({"step": step, **clean}))
        numbers = {k: float(v) for k, v in values.items() if isinstance(v, int | float)}
        if "time/step_s" in numbers and self._sinks:
            numbers |= system_metrics()
        self._tell(step, lambda sink: sink.write(step, numbers))

    def rows(self, step: int, split: str, table: Any) -> None:
        """Hand the logged rows of a step, a `pyarrow.Table`, to the sinks that show samples."""
        takers = [sink for sink in self._sinks if hasattr(sink, "rows")]
        if takers and table.num_rows:
            made = rows_of(table, split)
            self._tell(step, lambda sink: sink.rows(step, made), takers)

    def _tell(
        self, step: int, tell: Callable[[Any], None], sinks: Sequence[Sink] | None = None
    ) -> None:
        for sink in self._sinks if sinks is None else sinks:
            try:
                with self._turn:
                    if sink in self._sinks:
                        tell(sink)
            except Exception as error:  # the packages of loggers raise anything, and training does not depend on them
                if sink not in self._failed:
                    self._failed.append(sink)
                    log.warning(
                        "the logger %s does not take the metrics of step %d, and perhaps later ones: %s: %s",
                        type(sink).__name__, step, type(error).__name__, error,
                    )  # fmt: skip

    def close(self) -> None:
        """Flush and end every sink; none gets what a slow disk has written later."""
        self._file.close()
        with self._turn:
            sinks, self._sinks = self._sinks, ()
        for sink in sinks:
            try:
                sink.close()
            except Exception as error:  # as above
                log.warning(
                    "the logger %s cannot be closed, and may lack its last figures: %s: %s",
                    type(sink).__name__, type(error).__name__, error,
                )  # fmt: skip

    def _save(self, line: str) -> None:
        error = self._file.write_or_keep(line)
        if error is not None and not self._refused:
            log.warning(
                "metrics wait in memory until they can be written: %s: %s", self._path, error
            )
        self._refused = error is not None
        if error is None and self._file.size > self._thin_at:
            self._thin()

    def _thin(self) -> None:
        try:
            self._replace(list(_thinned(self._lines())))
        except OSError as error:
            log.warning("%s grows on: %s", self._path, error)
        else:
            log.warning(
                "%s had %d bytes: every second line of its older half was left out",
                self._path,
                self._thin_at,
            )
        self._thin_at = max(self._max_bytes, self._file.size + self._max_bytes // 4)

    def _lines(self) -> list[str]:
        return self._path.read_text().splitlines()

    def _replace(self, lines: Sequence[str]) -> None:
        """Replace the file: a kill leaves its old lines, or these."""
        writing = self._path.with_name(f".{self._path.name}.writing")
        try:
            with writing.open("w") as stream:
                stream.writelines(f"{line}\n" for line in lines)
                stream.flush()
                os.fsync(stream.fileno())
            writing.replace(self._path)
        except OSError:
            writing.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file.open()


def _thinned(lines: Sequence[str]) -> Iterator[str]:
    """The lines without every second training step and evaluation of the older half."""
    seen: Counter[bool] = Counter()
    older = len(lines) // 2
    for line in lines[:older]:
        kind = _is_training(line)
        seen[kind] += 1
        if seen[kind] % 2:
            yield line
    yield from lines[older:]


def _is_training(line: str) -> bool:
    return '"val/' not in line


def _from_1(lines: Sequence[str]) -> Iterator[str]:
    """The lines of a run, also of one whose training steps an older meshrl counted from 0."""
    shift: int | None = None
    for line in lines:
        training = _is_training(line)
        if training and shift is None:
            shift = 1 if _step_of(line) == 0 else 0
        if training and shift and _step_of(line) < math.inf:
            values = json.loads(line)
            line = json.dumps(values | {"step": values["step"] + shift})
        yield line


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _clean(value: Json) -> Json:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def system_metrics() -> dict[str, float]:
    """Resources that this process uses: memory in GiB, of the GPU too, and CPU seconds since its start."""
    import torch

    pages = int(STATM.read_text().split()[1]) if STATM.exists() else 0
    found = {
        "system/trainer_memory_gib": pages * os.sysconf("SC_PAGE_SIZE") / 2**30,
        "system/trainer_cpu_s": time.process_time(),
        "system/load": os.getloadavg()[0],
    }
    if torch.cuda.is_available():
        found["system/trainer_gpu_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


class LearningCheck:
    """Warns where a sign of `learning_signs` holds: when it appears, and again after twice as many steps."""

    def __init__(self) -> None:
        self._seen: defaultdict[str, list[float]] = defaultdict(list)
        self._held: Counter[str] = Counter()
        """Steps in a row at which a sign holds."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the metrics of a step, or of an evaluation, in."""
        for name in WATCHED & values.keys():
            self._seen[name].append(values[name])
        if any(name.startswith("val/") for name in values):
            return
        found = warnings_of(lambda name: self._seen.get(name, ()))
        self._held = Counter({one.sign.key: self._held[one.sign.key] + 1 for one in found})
        for one in found:
            steps = self._held[one.sign.key] - 1 + WINDOW
            if steps % WINDOW == 0 and (steps // WINDOW).bit_count() == 1:
                log.warning("step %d: %s", step, one)

    def close(self) -> None:
        """Do nothing."""


def open_loggers(names: Sequence[str], run: LoggedRun) -> list[Sink]:
    """The check that something is learned, and the loggers that `trainer.logger` names.

    Raises:
        UserError: the package of one is not installed. ConfigError: there is no such logger.
    """
    sinks: list[Sink] = [LearningCheck()]
    for name in names:
        try:
            sinks.append(load(LOGGERS, name, "open_logger")(run))
        except ImportError as error:
            raise UserError(
                f"trainer.logger: {name} cannot be used: {error} (docs/how-to/loggers.md)"
            ) from error
    return sinks
