"""Computes logged steps once more, from a checkpoint and the logged rows, and compares with what the run logged.

    checkpoint of step S ──▶ learn(rows of S) ──▶ ... ──▶ learn(rows of N)
                                   │                           │
                     log-probs, advantages of each row; loss, gradient norm: as logged?

A step is a function of its rows and of the weights before it, so on one CPU the figures come out again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from meshrl.contract.errors import CorruptError, UserError
from meshrl.contract.types import (
    ROUTED_EXPERTS,
    TOKEN_REWARDS,
    Batch,
    BatchRow,
    Outcome,
    Trajectory,
    Uid,
    Version,
    VersionSpan,
)
from meshrl.trainer.checkpoint import checkpoint
from meshrl.trainer.learner.learner import Learned, Learner
from meshrl.trainer.trajectories.files import file_of, read_back, read_rows
from meshrl.trainer.trajectories.log import per_token

FIGURES = ("actor/loss", "actor/grad_norm")
"""Metrics of a step, in metrics.jsonl."""
COMPARED = ("token_rewards", "values", "advantages", "returns", "trainer_logprobs")
"""Columns of each row, in this order, so that the first row that differs is the cause: in a step of several updates,
log-probs depend on the rows of earlier updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A figure that came out otherwise than it was logged."""

    name: str
    """A metric, or a column of a row."""
    uid: str | None
    token: int | None
    """Which of the row's response tokens differs most."""
    logged: float
    computed: float
    relative: float
    """Relative difference; of a column, the largest difference over the largest value of the row."""

    def __str__(self) -> str:
        where = self.name
        if self.uid is not None:
            where = f"row {self.uid}: {self.name} of response token {self.token}"
        return f"{where} was logged as {self.logged:.9g}, and is {self.computed:.9g} (relative {self.relative:.1e})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """One step, computed again."""

    step: int
    rows: int
    figures: Mapping[str, float]
    """Values of `FIGURES`, computed again."""
    largest: Mapping[str, float] = field(default_factory=dict)
    """The largest relative difference of each figure and column."""
    first: Difference | None = None
    """The first row that differs beyond the tolerance; else the first such figure."""


def starting_point(root: Path, step: int) -> Path | None:
    """The newest undamaged checkpoint of a step before `step` was made; None: the run's own start.

    Raises:
        CorruptError: there are such checkpoints, all damaged.
    """
    before = [(v, path) for v, path in checkpoint.complete(root) if v.step < step]
    problem: CorruptError | None = None
    for _, path in sorted(before, key=lambda one: (one[0].step, one[0].epoch), reverse=True):
        try:
            checkpoint.read_state(path)
        except CorruptError as error:
            problem = problem or error
        else:
            return path
    if problem is not None:
        raise problem
    return None


def replay(
    learner: Learner, folder: Path, metrics: Path, steps: range, *, tolerance: float
) -> Iterator[ReplayedStep]:
    """Compute `steps` again, up to the first that differs. The learner's weights are those before the first of them.

    Args:
        learner: On a world of one CPU process, filled from a checkpoint.
        folder: Directory of the logged rows.
        metrics: The run's metrics.jsonl.
        steps: Which, one after the other.
        tolerance: The largest relative difference that counts as the same.

    Raises:
        UserError: rows or figures of a step are not there, or the algorithm needs rows that are not logged.
    """
    if learner.needs.extra_rows:
        raise UserError(
            "the algorithm's greedy rows are its baseline, and are not logged: no replay"
        )
    if learner.needs.top:
        raise UserError("what the teacher thinks likeliest is not logged: no replay")
    if learner.trains_parts:
        raise UserError("rows of several branches are logged as one sequence: no replay")
    if file_of(folder, "train", 0).is_file():
        raise UserError(
            f"{folder}: an older meshrl counted the steps of this run from 0: replay it with that one"
        )
    for step in steps:
        if not file_of(folder, "train", step).is_file():
            raise UserError(f"{file_of(folder, 'train', step)} is missing: its rows are needed")
    figures = _figures(metrics, steps)
    for step in steps:
        made = _replayed(learner, folder, step, figures.get(step, {}), tolerance)
        yield made
        if made.first is not None:
            return


def _replayed(
    learner: Learner, folder: Path, step: int, figures: Mapping[str, float], tolerance: float
) -> ReplayedStep:
    path = file_of(folder, "train", step)
    logged = read_rows(path, per_token=True)
    wanted = figures.get("batch/rows", len(logged))
    if len(logged) != wanted:
        raise UserError(
            f"{path} has {len(logged)} rows, and step {step} was made from {wanted:.0f}:"
            " only a run with trainer.log_rows: all can be replayed"
        )
    batch = Batch.of_rows(
        [_manifest(row) for row in logged], batch_id="replay", run=logged[0]["uid"].split("/")[0],
        step=step - 1,
    )  # fmt: skip
    schedule = learner.schedule(batch)
    rows = {row["uid"]: row for row in logged}
    own = [_trajectory(rows[str(uid)], learner, folder) for uid in schedule.uids(0)]
    found: list[Learned] = []
    computed = learner.learn(schedule, own, step - 1, None, found.append)
    columns = per_token(found[0], range(len(schedule.rows)))
    largest: dict[str, float] = {}
    first: Difference | None = None
    offsets = found[0].experience.ragged.offsets.tolist()
    for name in (name for name in COMPARED if name in columns):
        for at, row in enumerate(schedule.rows):
            part = columns[name][offsets[at] : offsets[at + 1]]
            one = _compared(name, str(row.uid), rows[str(row.uid)][name], part)
            largest[name] = max(largest.get(name, 0.0), one.relative)
            if first is None and one.relative > tolerance:
                first = one
    results = {name: float(cast(float, computed[name])) for name in FIGURES if name in computed}
    for name, value in results.items():
        if name in figures:
            largest[name] = relative = _relative(value, figures[name])
            if first is None and relative > tolerance:
                first = Difference(
                    name=name, uid=None, token=None, logged=figures[name], computed=value,
                    relative=relative,
                )  # fmt: skip
    return ReplayedStep(step=step, rows=len(logged), figures=results, largest=largest, first=first)


def _relative(one: float, other: float) -> float:
    if math.isnan(one) or math.isnan(other):
        return 0.0 if math.isnan(one) and math.isnan(other) else math.inf
    return abs(one - other) / (max(abs(one), abs(other)) or 1.0)


def _compared(
    name: str, uid: str, logged: Sequence[float | None] | None, computed: npt.NDArray[Any]
) -> Difference:
    """The place of a row where the logged column is farthest from the computed one."""
    before = np.array([np.nan if v is None else v for v in logged or ()], dtype=np.float64)
    after = computed.astype(np.float64)
    if len(before) != len(after):
        before = np.full(len(after), np.nan)
    gap = np.abs(before - after)
    gap[np.isnan(before) & np.isnan(after)] = 0.0
    gap[np.isnan(gap)] = np.inf
    token = int(gap.argmax()) if len(gap) else 0
    largest = float(gap[token]) if len(gap) else 0.0
    known = np.concatenate([np.abs(before[~np.isnan(before)]), np.abs(after[~np.isnan(after)])])
    scale = float(known.max(initial=0.0)) or 1.0
    return Difference(
        name=name, uid=uid, token=token, relative=largest / scale,
        logged=float(before[token]) if len(gap) else 0.0,
        computed=float(after[token]) if len(gap) else 0.0,
    )  # fmt: skip


def _manifest(row: Mapping[str, Any]) -> BatchRow:
    versions = [Version(span["epoch"], span["step"]) for span in row["spans"]]
    nothing = Version(row["epoch"], row["step"] - 1 - row["staleness"])
    return BatchRow(
        uid=Uid.parse(row["uid"]),
        group=row["task"],
        group_size=row["group_size"],
        num_tokens=row["prompt_length"] + row["length"],
        oldest=min(versions, key=lambda v: (v.step, v.epoch), default=nothing),
        newest=max(versions, default=nothing),
        outcome=Outcome(row["outcome"]),
        # As the rollout says: micro-batches are cut by it, and sums are added in their order.
        prompt_tokens=row["prompt_length"],
    )


def _trajectory(row: Mapping[str, Any], learner: Learner, folder: Path) -> Trajectory:
    """The row as the trainer fetched it; of the columns before its response it reads nothing but the tokens."""
    start = row["prompt_length"]
    if ROUTED_EXPERTS in learner.columns:
        raise UserError(
            f"row {row['uid']} of step {row['step']} was logged without its experts (rollout.routing_replay)"
        )

    def whole(name: str, kind: type[np.generic]) -> npt.NDArray[Any]:
        if row[name] is None:
            raise UserError(f"row {row['uid']} of step {row['step']} was logged without {name}")
        return np.concatenate([np.zeros(start), np.array(row[name])]).astype(kind)

    return Trajectory(
        uid=Uid.parse(row["uid"]),
        tokens=np.array([*row["prompt_ids"], *row["response_ids"]], dtype=np.int32),
        loss_mask=whole("loss_mask", np.uint8),
        rollout_logprobs=whole("rollout_logprobs", np.float32),
        spans=tuple(
            VersionSpan(
                version=Version(span["epoch"], span["step"]),
                start=span["start"] + start,
                end=span["end"] + start,
            )
            for span in row["spans"]
        ),
        reward=row["reward"],
        reward_components=row["reward_components"],
        token_rewards=whole("token_rewards", np.float32)
        if TOKEN_REWARDS in learner.columns
        else None,
        ref_logprobs=whole("ref_logprobs", np.float32)
        if "ref_logprobs" in learner.columns
        else None,
        data_source=row["data_source"] or "",
        media=read_back(folder, row.get("pictures") or ()),
        replica=row["worker"] or "",
    )


def _figures(metrics: Path, steps: range) -> dict[int, dict[str, float]]:
    """The figures of each of `steps` that metrics.jsonl has.

    Raises:
        UserError: it has none of the last step.
    """
    try:
        lines = metrics.read_text().splitlines()
    except OSError as error:
        raise UserError(f"{metrics} cannot be read: {error.strerror}") from error
    found: dict[int, dict[str, float]] = {}
    for line in lines:
        try:
            values = json.loads(line)
            step = values["step"]
        except (ValueError, KeyError, TypeError):
            continue  # cut short by a kill
        if step in steps and "batch/rows" in values:
            found[step] = {
                name: math.nan if values[name] is None else values[name]
                for name in (*FIGURES, "batch/rows")
                if name in values
            }
    if steps[-1] not in found:
        raise UserError(f"{metrics} has no figures of step {steps[-1]}")
    return found
