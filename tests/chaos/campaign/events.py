"""Events as an actor saw them, one line each, appended with one system call, and read back as calls."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class EventLog:
    """Appends to `folder/<who>.jsonl`. Times are CLOCK_MONOTONIC: one clock for all processes of a machine."""

    def __init__(self, folder: Path, who: str) -> None:
        folder.mkdir(exist_ok=True)
        self._file = os.open(folder / f"{who}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._born = time.monotonic_ns()
        self._calls = 0
        # A killed process may leave half a line; our first line must not be joined to it.
        os.write(self._file, b"\n")

    def begin(self, verb: str, **asked: Any) -> str:
        """A question is about to be asked; the name of the call."""
        self._calls += 1
        call = f"{self._born}-{self._calls}"
        self._write({"call": call, "verb": verb, "asked": asked})
        return call

    def end(self, call: str, *, error: str = "", **answer: Any) -> None:
        """Record the answer of a call, or the code of its error."""
        self._write({"call": call, "error": error} if error else {"call": call, "answer": answer})

    def _write(self, event: dict[str, Any]) -> None:
        event["at"] = time.monotonic_ns()
        os.write(self._file, json.dumps(event, separators=(",", ":")).encode() + b"\n")


@dataclass(slots=True)
class Call:
    """A call of the queue; `answer` and `error` are None when the caller died before it recorded the answer."""

    who: str
    verb: str
    asked: dict[str, Any]
    begun: int
    ended: int | None = None
    answer: dict[str, Any] | None = None
    error: str | None = None


def read(folder: Path) -> list[Call]:
    """All calls of all actors, in the order in which they began."""
    calls = [call for path in folder.glob("*.jsonl") for call in _calls(path)]
    return sorted(calls, key=lambda call: call.begun)


def _calls(path: Path) -> Iterator[Call]:
    calls: dict[str, Call] = {}
    for event in lines(path):
        if "verb" in event:
            calls[event["call"]] = Call(path.stem, event["verb"], event["asked"], event["at"])
        elif event["call"] in calls:
            call = calls[event["call"]]
            call.ended, call.answer = event["at"], event.get("answer")
            call.error = event.get("error")
    return iter(calls.values())


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a file of JSON lines; an incomplete one was written by a process that died."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                continue
