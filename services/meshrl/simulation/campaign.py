"""Campaigns: many seeds one after the other, within a number or a time; and a failing seed shrunk to few faults.

`minimise` leaves faults out for as long as the run still fails in the same way: halves first, then single ones.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from meshrl.simulation.faults import Fault, draw_faults
from meshrl.simulation.loop import quiet
from meshrl.simulation.mesh import Report, simulate
from meshrl.simulation.services import Parts
from meshrl.simulation.shape import Shape, draw_shape


@dataclass(slots=True, kw_only=True)
class Totals:
    """What a campaign has done."""

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
    """Run `seeds` until they end or the time is over; `told` hears of each run."""
    totals = Totals()
    began, cpu = time.monotonic(), time.process_time()
    with collected_between() as collect:
        for seed in seeds:
            if minutes is not None and time.monotonic() - began > 60.0 * minutes:
                break
            report = run(seed)
            totals.seeds += 1
            totals.events += report.events
            totals.calls += report.calls
            totals.rows += report.trained
            totals.virtual_s += report.virtual_s
            totals.process_s = time.process_time() - cpu
            if report.problems:
                totals.failed += (seed,)
            told(report)
            collect()
    return totals


@contextmanager
def collected_between() -> Iterator[Callable[[], object]]:
    """Garbage is collected when the caller says so, and only what came since: modules are looked at once."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()

    def collect() -> None:
        with quiet():
            gc.collect()
        gc.freeze()  # what is left was imported or is kept by caches

    try:
        yield collect
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


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
    """With round numbers, which a person can read."""
    return replace(fault, at_s=round(fault.at_s, 1), seconds=round(fault.seconds, 1))


def story(minimal: Minimal, *, lines: int = 40) -> Iterator[str]:
    """What happened, for a person to read."""
    shape = minimal.shape
    yield f"seed {minimal.seed}: {len(minimal.faults)} faults are enough ({minimal.runs} runs)"
    yield f"  mesh: {shape}"
    for fault in minimal.faults:
        yield f"  fault at {fault}"
    yield "  then:"
    for line in minimal.report.log[-lines:]:
        yield from (f"    {part}" for part in line.splitlines())
