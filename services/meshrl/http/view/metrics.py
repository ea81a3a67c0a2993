"""Reads what a run's services write of it: metrics.jsonl as it grows, and spans.

Columns of numbers by metric, and what is wrong with the file in one line; one row from prompt to gradient, and one
step over time.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from meshrl.common.plain_text import counted
from meshrl.common.tracing import FOLDER, row_trace
from meshrl.contract.errors import NotFoundError
from meshrl.contract.types import Uid

MOST_POINTS = 4000
"""Points of one curve in an answer; of more, neighbours are averaged."""
MARK_BYTES = 64
"""Bytes before the read position that must be unchanged; otherwise the file was rewritten."""
CHUNK_BYTES = 1 << 24
MOST_LINE_BYTES = 1 << 22
"""A line without an end that is longer is broken."""
MOST_SPANS = 4000
"""Spans of one timeline; the longest are kept."""
NAMES = ("name", "service", "trace")
Line = dict[str, Any]


@dataclass(slots=True)
class _Column:
    """The values of one metric."""

    lines: array[int] = field(default_factory=lambda: array("q"))
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True, slots=True)
class MetricCurve:
    """Values by step, in the order of the file."""

    steps: list[float]
    values: list[float]


class MetricsFile:
    """The numbers of one metrics.jsonl. `refresh` reads appended lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.generation = 0
        """Rises when the file was rewritten, as by a trainer that resumed: what was sent before is void."""
        self._inode = 0
        self._forget()

    def _forget(self) -> None:
        self._columns: defaultdict[str, _Column] = defaultdict(_Column)
        self.lines = 0
        self.last_step: int | None = None
        self._offset = 0
        self._mark = b""
        self._broken: list[int] = []
        self._unreadable = ""

    @property
    def names(self) -> list[str]:
        """Every metric that had a number."""
        return sorted(self._columns)

    @property
    def problem(self) -> str:
        """The file's fault, in one line; empty without one."""
        if self._unreadable:
            return self._unreadable
        if self._broken:
            first, count = self._broken[0], len(self._broken)
            which = f"line {first} is" if count == 1 else f"{count} lines are (the first: {first})"
            return f"{self._path.name}: {which} no JSON object with a step: left out"
        return ""

    def refresh(self) -> None:
        """Read what was appended since the last call; all of it, if the file was rewritten."""
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                file.seek(max(0, self._offset - len(self._mark)))
                if inode != self._inode or file.read(len(self._mark)) != self._mark:
                    self.generation += self._offset > 0
                    self._forget()
                    self._inode = inode
                    file.seek(0)
                while chunk := file.read(CHUNK_BYTES):
                    taken = self._take(chunk)
                    file.seek(self._offset)
                    if not taken:
                        break
                self._unreadable = ""
        except FileNotFoundError:
            self._unreadable = f"{self._path.name}: no such file yet: no step was made"
        except OSError as error:
            self._unreadable = f"{self._path.name}: {error.strerror}"

    def values(self, name: str) -> Sequence[float]:
        """All values of a metric, in the order of the file; empty where there is none."""
        column = self._columns.get(name)
        return column.values if column is not None else ()

    def curves(self, names: Iterable[str], after: int = 0) -> Mapping[str, MetricCurve]:
        """The named metrics from line `after` on; unknown ones are left out."""
        found = {}
        for name in names:
            column = self._columns.get(name)
            if column is not None:
                start = bisect_left(column.lines, after)
                found[name] = _thinned(column.steps[start:], column.values[start:])
        return found

    def _take(self, chunk: bytes) -> int:
        """Take whole lines in; the number of bytes taken."""
        end = chunk.rfind(b"\n") + 1
        if not end and len(chunk) > MOST_LINE_BYTES:
            end = len(chunk)
        for line in chunk[:end].splitlines():
            self._take_line(line)
        if end:
            self._offset += end
            self._mark = chunk[max(0, end - MARK_BYTES) : end]
        return end

    def _take_line(self, line: bytes) -> None:
        number, self.lines = self.lines, self.lines + 1
        if not line.strip():
            return
        try:
            fields = json.loads(line)
            step = int(fields["step"])
            array("q", [step])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            self._broken.append(number + 1)
            return
        self.last_step = step
        for name, value in fields.items():
            # Bigger integers than a float holds are no measurements.
            if isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
                try:
                    number_of = float(value)
                except OverflowError:
                    continue
                if math.isfinite(number_of):
                    column = self._columns[name]
                    column.lines.append(number)
                    column.steps.append(step)
                    column.values.append(number_of)


def _thinned(steps: array[int], values: array[float]) -> MetricCurve:
    """At most MOST_POINTS points: each the mean of its neighbours, at their mean step."""
    width = -(-len(steps) // MOST_POINTS)
    if width <= 1:
        return MetricCurve(list(steps), list(values))
    parts = [slice(at, at + width) for at in range(0, len(steps), width)]
    return MetricCurve(
        [sum(steps[part]) / len(steps[part]) for part in parts],
        [sum(values[part]) / len(values[part]) for part in parts],
    )


class SpanFiles:
    """The spans of one run directory, as its files are now."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER
        self._broken: dict[str, int] = {}

    @property
    def problem(self) -> str:
        """The files' faults, in one line; empty without any."""
        if not self._folder.is_dir():
            return f"{self._folder}: no spans: run.trace says which share of the rows is traced (run.trace=0.1)"
        told = [f"{name}: {counted(count, 'line')}" for name, count in sorted(self._broken.items())]
        return f"{', '.join(told)} cannot be read: left out" if told else ""

    def row(self, uid: Uid) -> list[Line]:
        """Everything that happened to a row, in order."""
        trace = row_trace(uid)[0]
        return sorted(self._lines(trace), key=lambda line: (line["start_ns"], -line["end_ns"]))

    def steps(self) -> list[int]:
        """The optimizer steps that have spans."""
        roots = self._lines('"name":"step"', '"name": "step"')
        return sorted(
            {int(line["attributes"]["step"]) for line in roots if _step(line) is not None}
        )

    def timeline(self, step: int) -> dict[str, Any]:
        """The spans of all services while a step was made, by service; of a repeated step, during its last attempt.

        Raises:
            NotFoundError: the step has no spans.
        """
        own = [
            line for line in self._lines(f'"step":{step}', f'"step": {step}') if _step(line) == step
        ]
        own = [line for line in own if "uid" not in line["attributes"]]
        if not own:
            raise NotFoundError(f"step {step} has no spans")
        # A step that a new trainer made again has a trace for each time: the last one counts.
        last = max(own, key=lambda line: line["start_ns"])["trace"]
        own = [line for line in own if line["trace"] == last]
        start = min(line["start_ns"] for line in own)
        end = max(line["end_ns"] for line in own)
        # Rows that were worked on at once have the same span each: one stands for all.
        beside = list(
            {
                (line["service"], line["name"], line["start_ns"], line["end_ns"]): line
                for line in self._lines()
                if line["end_ns"] >= start and line["start_ns"] <= end and line["name"] != "step"
            }.values()
        )
        beside.sort(key=lambda line: line["start_ns"] - line["end_ns"])
        lanes: defaultdict[str, list[Line]] = defaultdict(list)
        for line in sorted(beside[:MOST_SPANS], key=lambda line: line["start_ns"]):
            lanes[line["service"]].append(
                {
                    "name": line["name"],
                    "start_s": (line["start_ns"] - start) / 1e9,
                    "end_s": (line["end_ns"] - start) / 1e9,
                    "attributes": line["attributes"],
                }
            )
        return {
            "step": step,
            "seconds": (end - start) / 1e9,
            "lanes": [{"service": name, "spans": lanes[name]} for name in sorted(lanes)],
            "left_out": max(0, len(beside) - MOST_SPANS),
        }

    def _lines(self, *texts: str) -> Iterator[Line]:
        """The spans of all files whose line holds one of these texts, the older file of a service first."""
        self._broken = {}
        wanted = [text.encode() for text in texts or ("",)]
        for path in sorted(self._folder.glob("*.jsonl*"), key=lambda path: path.name[::-1]):
            try:
                content = path.read_bytes()
            except OSError:  # moved aside meanwhile
                continue
            for raw in content.splitlines():
                if not any(text in raw for text in wanted):
                    continue
                try:
                    line = orjson.loads(raw)
                    if line["start_ns"] <= line["end_ns"] and all(line[key] for key in NAMES):
                        line["attributes"].get("step")
                        yield line
                except (ValueError, KeyError, TypeError, AttributeError):
                    self._broken[path.name] = self._broken.get(path.name, 0) + 1


def _step(line: Line) -> int | None:
    step = line["attributes"].get("step")
    return step if isinstance(step, int) else None
