"""Train from Python, and read what runs left: `from meshrl.api import open_run, run`.

A run is an object: start it, wait for it, stop it, read its figures and its rows. `meshrl` itself can hold no names:
it is a namespace, whose portions lie in several folders.

    run(recipe) ─ starts ─▶ meshrl up, a process of its own ─ writes ─▶ the run's directory ─ read by ─▶ Run

The run goes on when the process that started it ends, and `open_run` finds it again: from another process, after its
end or in a copy.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic_core import to_jsonable_python

from meshrl.api.history import HELD_OUT, STEP, RunHistory
from meshrl.api.rows import Order, find_rows
from meshrl.common.python_process import PYTHON
from meshrl.config.loading import in_yaml, load_recipe
from meshrl.config.recipe import METRICS_NAME
from meshrl.contract.errors import MeshError, UserError
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, LOCK_NAME, is_up, newest_run_dir
from meshrl.launcher.run_directory import finished_line

__all__ = ["Run", "RunStatus", "open_run", "run"]

ERRORS_NAME = "up.err"
"""In the run's `logs`: errors and warnings of a `meshrl up` that was started from here."""
LOOK_EVERY_S = 0.2


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
    """From its first figures to its last ones."""


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
        """As Ctrl-C does: end the step, save a checkpoint, drain. The same `run` goes on from there."""
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
        """What the model said, and what it got for it: `pandas.DataFrame(run.rows(step=12))`.

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

    A run that is finished is not started again, and one that was stopped goes on, as with `meshrl up`.

    Args:
        recipe: A YAML file.
        overrides: Keys to values, `{"rollout.n": 16}`, or as on the command line, `["rollout.n=16"]`.
        accept_changes: Go on with other data, another model, reward, program or seed than the run began with.

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
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
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
    """As on the command line."""
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
