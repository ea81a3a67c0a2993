"""Finds logged rows of a run: by step, condition, name and reward. Reads the run's files alone."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from meshrl.contract.errors import UserError
from meshrl.trainer.trajectories.files import FOLDER, LoggedFile, logged_files

Row: TypeAlias = Mapping[str, Any]
Order: TypeAlias = Literal["worst", "best"]
Test: TypeAlias = Callable[[Row], bool]


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

    Args:
        directory: The run's.
        step: `N`, `N-M` or `all`; None is the newest one, all of them with `uid`.
        held_out: Rows of evaluations instead of trained ones.
        where: A condition, as in `reward < 0.5 and staleness > 1`.
        uid: A row (`run/task/index.attempt`, the run may be left out), or the task of several.
        order: By reward; None is the newest file first.
        most: No more than so many.
        per_token: With the columns that have a value for each token.

    Raises:
        UserError: no such rows are logged there, or the condition is none.
    """
    # Imported here, like pyarrow later: a wrong option is answered at once.
    from meshrl.trainer.trajectories.where import condition

    tests = [condition(where)] if where is not None else []
    if uid is not None:
        tests.append(_named(uid))
    files = _chosen(directory, step or ("all" if uid else None), held_out)
    return _found(files, tests, order, most, per_token)


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
    return lambda row: (
        uid
        in (
            row["uid"],
            f"{row['task']}/{row['index']}.{row['attempt']}",
            row["task"],
        )
    )


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
        sign = 1 if order == "worst" else -1
        if math.isinf(most):
            ranked = sorted(scored, key=lambda pair: sign * pair[1]["reward"])
        else:
            ranked = heapq.nsmallest(int(most), scored, key=lambda pair: sign * pair[1]["reward"])
        matching = iter(ranked)
    if not math.isinf(most):
        matching = islice(matching, int(most))
    if not per_token:
        yield from (row for _, row in matching)
        return
    for file, pairs in groupby(matching, key=lambda pair: pair[0]):
        uids = [row["uid"] for _, row in pairs]
        full = {row["uid"]: row for row in read_rows(file.path, per_token=True, uids=uids)}
        yield from (full[uid] for uid in uids if uid in full)
