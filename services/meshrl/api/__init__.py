"""Train from Python, and read what runs left: `from meshrl.api import open_run, run`.

A run is an object: start it, wait for it, stop it, read its figures and its rows. `meshrl` itself can hold no names:
it is a namespace, whose portions lie in several folders.

    run(recipe) ─ starts ─▶ meshrl up, a process of its own ─ writes ─▶ the run's directory ─ read by ─▶ Run

The run continues after the process that started it, and `open_run` finds it again: from another process, after its
end or in a copy.
"""

from __future__ import annotations

import heapq
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from pydantic_core import to_jsonable_python

from meshrl.common.files import make_private
from meshrl.common.python_process import PYTHON
from meshrl.config.loading import in_yaml, load_recipe
from meshrl.config.recipe import METRICS_NAME
from meshrl.contract.errors import MeshError, UserError
from meshrl.http.view.metrics import MetricCurve, MetricsFile
from meshrl.launcher.address_book import (
    ADDRESS_BOOK_NAME,
    LOCK_NAME,
    AddressBook,
    is_up,
    newest_run_dir,
)
from meshrl.launcher.run_directory import FINISHED_NAME, finished_line
from meshrl.trainer.trajectories.files import FOLDER, LoggedFile, logged_files

__all__ = ["Run", "RunStatus", "open_run", "run"]

ERRORS_NAME = "up.err"
"""In the run's `logs`: errors and warnings of a `meshrl up` that was started from here."""
LOOK_EVERY_S = 0.2
STEP = "reward/mean"
"""A metric that each training step has."""
HELD_OUT = "val/score/mean"
TIME = "time/unix_s"
Row: TypeAlias = Mapping[str, Any]
Order: TypeAlias = Literal["worst", "best"]
Test: TypeAlias = Callable[[Row], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """How a run does, as its files tell."""

    state: str
    """running, finished (it did all that its recipe asks for) or stopped."""
    steps: int
    """Optimizer steps done."""
    reward: float | None
    """Mean of the newest step."""
    held_out_score: float | None
    """Mean of the newest evaluation."""
    samples: int
    """Rows trained."""
    seconds: float
    """Seconds from its first figures to its last ones."""


@dataclass(slots=True)
class Run:
    """A run, by its directory. `with run(...) as training:` stops it at the end of the block."""

    directory: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def __enter__(self) -> Self:
        """The run itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it, if it still runs."""
        self.stop()

    @property
    def is_running(self) -> bool:
        """Whether a `meshrl up` trains it now."""
        return (self._process is not None and self._process.poll() is None) or is_up(self.directory)

    @property
    def status(self) -> RunStatus:
        """State and newest figures."""
        found = RunHistory.read(self.directory)
        return RunStatus(
            state="running" if self.is_running else found.state,
            steps=found.steps,
            reward=found.last(STEP),
            held_out_score=found.last(HELD_OUT),
            samples=found.samples,
            seconds=found.seconds,
        )

    def wait(self, timeout_s: float = math.inf) -> RunStatus:
        """Wait until the run ends, or for `timeout_s`; how it does then.

        Raises:
            UserError: it ended because its recipe, data or code are wrong.
            MeshError: it ended for another reason than a stop.
        """
        deadline = time.monotonic() + timeout_s
        while self.is_running and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(LOOK_EVERY_S, left))
        if self._process is not None and (code := self._process.poll()):
            self._process = None
            if code not in _STOPPED:
                raise (UserError if code == 2 else MeshError)(self._last_words(code))
        return self.status

    def stop(self) -> RunStatus:
        """Stop as Ctrl-C does: end the step, save a checkpoint, drain. The same `run` continues from there."""
        pid = self._process.pid if self._process is not None else _holder(self.directory)
        if pid is not None and self.is_running:
            os.kill(pid, signal.SIGINT)
        return self.wait()

    def metrics(self) -> list[dict[str, Any]]:
        """A dictionary per training step and evaluation, in order: `pandas.DataFrame(run.metrics())`."""
        try:
            lines = (self.directory / METRICS_NAME).read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def rows(
        self,
        step: int | str | None = None,
        *,
        where: str | None = None,
        uid: str | None = None,
        order: Order | None = None,
        held_out: bool = False,
        limit: int | None = None,
        per_token: bool = False,
    ) -> list[dict[str, Any]]:
        """Rows with the model's answers and their rewards: `pandas.DataFrame(run.rows(step=12))`.

        Args:
            step: A number, `"10-20"` or `"all"`; None is the newest step, all of them with `uid`.
            where: A condition, as in `"reward < 0.5 and staleness > 1"`.
            uid: A row (`run/task/index.attempt`, the run may be left out), or the task of several.
            order: `"worst"` or `"best"` rewards first.
            held_out: Rows of evaluations instead of trained ones.
            limit: Largest number of rows.
            per_token: With the columns that have a value for each token.

        Raises:
            UserError: no such rows are logged, or the condition is none.
        """
        found = find_rows(
            self.directory,
            step=None if step is None else str(step),
            held_out=held_out,
            where=where,
            uid=uid,
            order=order,
            most=math.inf if limit is None else limit,
            per_token=per_token,
        )
        return [dict(row) for row in found]

    def _last_words(self, code: int) -> str:
        """Why `up` ended, in its words."""
        said = self.directory / "logs" / ERRORS_NAME
        lines = said.read_text(errors="replace").splitlines() if said.exists() else []
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return "\n".join(errors) or f"meshrl up ended with code {code}; see {said.parent}"


_STOPPED = (-signal.SIGINT, 130, 143)


def run(
    recipe: Path | str,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    accept_changes: bool = False,
) -> Run:
    """Train as a recipe says, in processes beside this one; returns when they are started.

    A run that is finished is not started again, and one that was stopped continues, as with `meshrl up`.

    Args:
        recipe: A YAML file.
        overrides: Keys to values, `{"rollout.n": 16}`, or as on the command line, `["rollout.n=16"]`.
        accept_changes: Continue with other data, another model, reward, program or seed than the run began with.

    Raises:
        ConfigError: the recipe would not start; one line per problem.
        UserError: its directory is in use by another `meshrl up`.
    """
    path = Path(recipe)
    words = _words(overrides)
    loaded = load_recipe(path, words)
    directory = loaded.run.path.absolute()
    if is_up(directory):
        raise UserError(
            f"{directory} is in use: it is trained already; see open_run({str(directory)!r})"
        )
    if finished_line(loaded) is not None:
        return Run(directory)
    logs = directory / "logs"
    make_private(directory, "run.dir")
    make_private(logs, "run.dir")
    options = ["--plain"]
    if accept_changes:
        options.append("--accept-changes")
    with (logs / ERRORS_NAME).open("wb") as errors:
        process = subprocess.Popen(
            [*PYTHON, "meshrl.cli", "up", str(path), *words, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the lines of services are in their logs
            stderr=errors,
            start_new_session=True,  # a Ctrl-C in the notebook or at the prompt is not meant for it
        )
    return Run(directory, process)


def open_run(directory: Path | str | None = None) -> Run:
    """The run in `directory`, the newest one in `runs` if not given, whether it runs or has ended.

    Raises:
        UserError, NotFoundError: there is none.
    """
    path = Path(directory) if directory is not None else newest_run_dir()
    if not any((path / name).exists() for name in (ADDRESS_BOOK_NAME, METRICS_NAME)):
        raise UserError(
            f"{path}: no run's directory (it has no {ADDRESS_BOOK_NAME} and no {METRICS_NAME})"
        )
    return Run(path.absolute())


def _words(overrides: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Overrides as words of a command line."""
    if not isinstance(overrides, Mapping):
        return list(overrides)
    plain = to_jsonable_python(dict(overrides), fallback=str)
    return [f"{key}={in_yaml(value)}" for key, value in plain.items()]


def _holder(directory: Path) -> int | None:
    """The `meshrl up` that trains there."""
    try:
        return int((directory / LOCK_NAME).read_text())
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """One run."""

    directory: Path
    name: str
    state: str
    """running, finished (it did all that its recipe asks for) or stopped."""
    metrics: MetricsFile

    @classmethod
    def read(cls, directory: Path) -> RunHistory:
        """The run in `directory`; a directory without a run has no steps and the directory's name."""
        metrics = MetricsFile(directory / METRICS_NAME)
        metrics.refresh()
        try:
            name = AddressBook.load(directory / ADDRESS_BOOK_NAME).run
        except MeshError:
            name = directory.name
        found = cls(directory=directory, name=name, state="running", metrics=metrics)
        if is_up(directory):
            return found
        finished = _finished_at(directory / FINISHED_NAME) == found.steps
        return replace(found, state="finished" if finished else "stopped")

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        curve = self._curve(STEP)
        if not curve:
            return 0
        return int(curve.steps[-1]) + (curve.steps[0] == 0)  # an older meshrl counted from 0

    @property
    def ended_unix_s(self) -> float | None:
        """When it last did something; None before its first step."""
        return self.last(TIME)

    @property
    def seconds(self) -> float:
        """Seconds from its first figures to its last ones, pauses included."""
        times = self.values(TIME)
        return max(times) - min(times) if times else 0.0

    @property
    def samples(self) -> int:
        """Rows trained; an estimate where metrics.jsonl is too long to have every step."""
        rows = self.values("batch/rows")
        return round(sum(rows) / len(rows) * self.steps) if rows else 0

    def values(self, metric: str) -> list[float]:
        """Values of one metric in the order of its steps; empty where there is none."""
        curve = self._curve(metric)
        return curve.values if curve else []

    def last(self, metric: str) -> float | None:
        """The newest value."""
        return next(reversed(self.values(metric)), None)

    def _curve(self, metric: str) -> MetricCurve | None:
        return self.metrics.curves((metric,)).get(metric)


def _finished_at(note: Path) -> int | None:
    """The step at which the run had done all that it was asked to; None where it had not."""
    try:
        return int(json.loads(note.read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_rows(
    directory: Path,
    *,
    step: str | None = None,
    held_out: bool = False,
    where: str | None = None,
    uid: str | None = None,
    order: Order | None = None,
    most: float = math.inf,
    per_token: bool = False,
) -> Iterator[Row]:
    """At most `most` rows of the run in `directory`, as `meshrl rows` chooses and orders them.

    Arguments and errors as of `Run.rows`; a `step` is text, and without an `order` the newest file comes first.
    """
    # Imported here, like pyarrow later: a wrong option is answered at once.
    from meshrl.trainer.trajectories.where import condition

    tests = [condition(where)] if where is not None else []
    if uid is not None:
        tests.append(_named(uid))
    files = _chosen(directory, step or ("all" if uid else None), held_out)
    return _found(files, tests, order, most, per_token)


def prompt_of(row: Row) -> str:
    """The prompt as text: its tokens, or its messages where the run has no tokenizer."""
    if row["prompt"] is not None:
        return str(row["prompt"])
    return "\n".join(f"{m['role']}: {m['content']}" for m in row["messages"] or ())


def said_in(row: Row) -> list[tuple[str, str]]:
    """Pairs of speaker and text, one for each part of the response; the speaker is `policy` or `observed`."""
    parts = row["parts"] or [{"sampled": True, "text": row["response"]}]
    return [("policy" if part["sampled"] else "observed", part["text"] or "") for part in parts]


def _chosen(directory: Path, step: str | None, held_out: bool) -> list[LoggedFile]:
    """The files to look into, the newest first. Raises UserError where there is none."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; want a run's, such as runs/demo")
    kind = "evaluation" if held_out else "step"
    files = logged_files(directory / FOLDER, "eval" if held_out else "train")[::-1]
    if not files:
        raise UserError(f"{directory}: no rows of any {kind} are logged there (trainer.log_rows)")
    if step is None:
        return files[:1]
    low, high = _steps(step)
    chosen = [file for file in files if low <= file.step <= high]
    if not chosen:
        raise UserError(
            f"--step {step}: no rows are logged of it; there are {len(files)} {kind}s"
            f" from {files[-1].step} to {files[0].step}"
        )
    return chosen


def _steps(text: str) -> tuple[float, float]:
    if text == "all":
        return 0, math.inf
    first, dash, last = text.partition("-")
    if not (first.isdecimal() and (last.isdecimal() if dash else not last)):
        raise UserError(f"--step {text}: want a number, two with a dash (10-20), or all")
    return int(first), int(last) if dash else int(first)


def _named(uid: str) -> Test:
    """Whether a row is `run/task/index.attempt`, or that without the run, or one of a task."""

    def test(row: Row) -> bool:
        short = f"{row['task']}/{row['index']}.{row['attempt']}"
        return uid in (row["uid"], short, row["task"])

    return test


def _found(
    files: Sequence[LoggedFile],
    tests: Sequence[Test],
    order: Order | None,
    most: float,
    per_token: bool,
) -> Iterator[Row]:
    from meshrl.trainer.trajectories.files import read_rows

    matching: Iterator[tuple[LoggedFile, Row]] = (
        (file, row)
        for file in files
        for row in read_rows(file.path)
        if all(test(row) for test in tests)
    )
    if order is not None:
        scored = ((file, row) for file, row in matching if row["reward"] is not None)
        ranks = heapq.nsmallest if order == "worst" else heapq.nlargest
        kept = sys.maxsize if math.isinf(most) else int(most)
        matching = iter(ranks(kept, scored, key=lambda pair: pair[1]["reward"]))
    elif not math.isinf(most):
        matching = islice(matching, int(most))
    if not per_token:
        yield from (row for _, row in matching)
        return
    for file, pairs in groupby(matching, key=lambda pair: pair[0]):
        uids = [row["uid"] for _, row in pairs]
        full = {row["uid"]: row for row in read_rows(file.path, per_token=True, uids=uids)}
        yield from (full[uid] for uid in uids if uid in full)
