"""Campaigns: many seeds one after the other, within a number or a time; and a failing seed shrunk to few faults.

campaign ──fork──▶ 25 runs, then the process ends with all that they left ──reports──▶ Totals

`minimise` leaves faults out for as long as the run still fails in the same way: halves first, then single ones.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import pickle
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, NoReturn

from meshrl.common.plain_text import counted
from tests.simulation.faults import Fault, draw_faults
from tests.simulation.mesh import Report, simulate
from tests.simulation.services import Parts
from tests.simulation.shape import Shape, draw_shape

RUNS_OF_A_FORK: Final = 25
"""A run leaves some 8 MB behind."""


@dataclass(slots=True, kw_only=True)
class Totals:
    """Totals of a campaign."""

    seeds: int = 0
    events: int = 0
    calls: int = 0
    rows: int = 0
    virtual_s: float = 0.0
    process_s: float = 0.0
    """Processor time."""
    failed: tuple[int, ...] = ()
    """Seeds."""

    @property
    def per_hour(self) -> float:
        """Runs in an hour of processor time."""
        return 3600.0 * self.seeds / max(1e-9, self.process_s)


def campaign(
    seeds: Iterator[int],
    *,
    minutes: float | None = None,
    told: Callable[[Report], None],
    run: Callable[[int], Report] = simulate,
) -> Totals:
    """Run `seeds` until they end or the time is over; `told` hears of each run.

    Raises:
        RuntimeError: a run has ended its process, or raised.
    """
    totals = Totals()
    until = math.inf if minutes is None else time.monotonic() + 60.0 * minutes
    began = _processor_s()
    gc.collect()
    gc.freeze()  # no fork touches what is there already
    try:
        while some := list(itertools.islice(seeds, RUNS_OF_A_FORK)):
            for report in _in_a_fork(some, run, until):
                totals.seeds += 1
                totals.events += report.events
                totals.calls += report.calls
                totals.rows += report.trained
                totals.virtual_s += report.virtual_s
                totals.failed += (report.seed,) * bool(report.problems)
                told(report)
            totals.process_s = _processor_s() - began
            if time.monotonic() >= until:
                break
    finally:
        gc.unfreeze()
    return totals


def _in_a_fork(
    seeds: Sequence[int], run: Callable[[int], Report], until: float
) -> Iterator[Report]:
    """The reports of `seeds` up to a moment of the monotonic clock, from a fork that collects no garbage.

    What a run leaves is full of cycles: to collect it takes a quarter of the time of the run itself.
    """
    receiving, sending = os.pipe()
    if not (child := os.fork()):
        os.close(receiving)
        _send_reports(seeds, run, until, sending)
    os.close(sending)
    told, status = 0, -1
    try:
        with os.fdopen(receiving, "rb") as reports, suppress(EOFError):
            while True:
                report: Report = pickle.load(reports)
                told += 1
                yield report
        _, status = os.waitpid(child, 0)
    finally:
        if status < 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if status:
        code = os.waitstatus_to_exitcode(status)
        raise RuntimeError(f"the process of seed {seeds[told]} ended with {code}")


def _send_reports(
    seeds: Sequence[int], run: Callable[[int], Report], until: float, to: int
) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the campaign, which ends this
        gc.disable()
        with os.fdopen(to, "wb") as reports:
            for seed in seeds:
                if time.monotonic() >= until:
                    break
                pickle.dump(run(seed), reports)
                reports.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _processor_s() -> float:
    """Processor time of this process and of its forks that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def kind_of(problem: str) -> str:
    """A problem without its numbers and names: two runs fail in the same way if these are equal."""
    return re.sub(r"\S*\d\S*", "#", problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimal:
    """A failing run with as few faults as were found to be enough."""

    seed: int
    shape: Shape
    faults: tuple[Fault, ...]
    report: Report
    runs: int
    """How many it took."""


def minimise(seed: int, *, parts: Parts | None = None, most_runs: int = 200) -> Minimal | None:
    """Shrink the faults of a failing seed; None if it does not fail."""
    shape = draw_shape(seed)
    faults: Sequence[Fault] = draw_faults(
        seed, shape.services, until_s=shape.faults_until_s, most=shape.most_faults
    )
    runs = 0

    def attempt(chosen: Sequence[Fault]) -> Report:
        nonlocal runs
        runs += 1
        return simulate(seed, shape=shape, faults=chosen, parts=parts)

    report = attempt(faults)
    if not report.problems:
        return None
    wanted = kind_of(report.problems[0])
    size = max(1, len(faults) // 2)
    while faults and runs < most_runs:
        smaller = None
        for start in range(0, len(faults), size):
            fewer = [*faults[:start], *faults[start + size :]]
            found = attempt(fewer)
            if any(kind_of(problem) == wanted for problem in found.problems):
                smaller, report = fewer, found
                break
        if smaller is not None:
            faults = smaller
            size = min(size, max(1, len(faults) // 2))
        elif size == 1:
            break
        else:
            size = max(1, size // 2)
    shortened = [_shortened(fault) for fault in faults]
    found = attempt(shortened)
    if any(kind_of(problem) == wanted for problem in found.problems):
        faults, report = shortened, found
    return Minimal(seed=seed, shape=shape, faults=tuple(faults), report=report, runs=runs)


def _shortened(fault: Fault) -> Fault:
    """The fault with rounded times, which a person can read."""
    return replace(fault, at_s=round(fault.at_s, 1), seconds=round(fault.seconds, 1))


def story(minimal: Minimal, *, lines: int = 40) -> Iterator[str]:
    """The course of events, for a person to read."""
    shape = minimal.shape
    enough = counted(len(minimal.faults), "fault is", "faults are")
    yield f"seed {minimal.seed}: {enough} enough ({counted(minimal.runs, 'run')})"
    yield f"  mesh: {shape}"
    for fault in minimal.faults:
        yield f"  fault at {fault}"
    yield "  then:"
    for line in minimal.report.log[-lines:]:
        yield from (f"    {part}" for part in line.splitlines())
