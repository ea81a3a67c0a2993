"""Reads the spans that the services of a run wrote: one row from prompt to gradient, and one step over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from meshrl.common.plain_text import counted
from meshrl.common.tracing import FOLDER, row_trace
from meshrl.contract.errors import NotFoundError
from meshrl.contract.types import Uid

MOST_SPANS = 4000
"""Of one timeline: the longest."""
NAMES = ("name", "service", "trace")
Line = dict[str, Any]


class SpanFiles:
    """The spans of one run directory, as its files are now."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER
        self._broken: dict[str, int] = {}

    @property
    def problem(self) -> str:
        """What is wrong with the files, in one line; empty if nothing is."""
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
        """Who did what while a step was made, the last time if more than once: from its first span to its last one.

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
