"""`python -m tests.simulation`: whole trainings on a simulated network and disk, each seed with faults of its own."""

from __future__ import annotations

import itertools
import logging
import random
import sys

import click

from meshrl.cli.options import Finite
from meshrl.common.plain_text import counted
from meshrl.rpc.exit_codes import Exit


@click.command()
@click.option("--seeds", type=click.IntRange(min=1), help="How many runs; default: 100.")
@click.option("--seed", type=int, help="The first seed; drawn and printed if it is not given.")
@click.option("--minutes", type=Finite(min=0), help="Begin no run after so long.")
@click.option("--replay", is_flag=True, help="Run --seed alone, and print what happens.")
@click.option("--minimise", is_flag=True, help="Find the fewest faults with which --seed fails.")
@click.option("--mutant", help="Plant this bug; `list` names them.")
def simulate(
    seeds: int | None,
    seed: int | None,
    minutes: float | None,
    replay: bool,
    minimise: bool,
    mutant: str | None,
) -> None:
    """Train on simulated meshes while processes die, networks break and disks fill; exit code 1 if one goes wrong.

    A run that fails prints the command that repeats it.
    """
    from tests.simulation.campaign import campaign, story
    from tests.simulation.campaign import minimise as shrink
    from tests.simulation.mesh import Report
    from tests.simulation.mesh import simulate as run
    from tests.simulation.mutants import MUTANTS
    from tests.simulation.services import Parts

    logging.disable(logging.CRITICAL)  # what the services log while they are killed
    if mutant == "list":
        for name, planted in MUTANTS.items():
            click.echo(f"{name:24} {planted.what}")
        return
    if mutant is not None and mutant not in MUTANTS:
        raise click.UsageError(f"--mutant {mutant}: want one of {', '.join(MUTANTS)}")
    parts = Parts() if mutant is None else MUTANTS[mutant].parts
    if (replay or minimise) and seed is None:
        raise click.UsageError("--replay and --minimise want --seed N")
    planted_by = f" --mutant {mutant}" if mutant else ""
    if minimise and seed is not None:
        minimal = shrink(seed, parts=parts)
        if minimal is None:
            click.echo(f"seed {seed} does not fail")
            return
        for line in story(minimal):
            click.echo(line)
        sys.exit(Exit.FAILED)
    if replay and seed is not None:
        report = run(seed, parts=parts, trace=True)
        for line in report.log:
            click.echo(line)
        click.echo(_summary(report))
        sys.exit(Exit.FAILED if report.problems else Exit.DONE)
    first = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    count = seeds if seeds is not None else None if minutes is not None else 100
    chosen = itertools.count(first) if count is None else iter(range(first, first + count))

    def told(report: Report) -> None:
        if report.problems:
            click.echo(_summary(report))
            click.echo(
                f"  replay: python -m tests.simulation --seed {report.seed} --replay{planted_by}"
            )

    totals = campaign(chosen, minutes=minutes, told=told, run=lambda each: run(each, parts=parts))
    click.echo(
        f"seeds {first} to {first + totals.seeds - 1}: {len(totals.failed)} of {totals.seeds} failed;"
        f" {counted(totals.rows, 'row')} trained, {counted(totals.calls, 'call')}, {counted(totals.events, 'event')},"
        f" {totals.virtual_s:,.0f} virtual s in {totals.process_s:.0f} s of processor time"
        f" ({totals.per_hour:,.0f} runs/h)"
    )
    sys.exit(Exit.FAILED if totals.failed else Exit.DONE)


def _summary(report: object) -> str:
    """One run in a few lines."""
    from tests.simulation.mesh import Report

    assert isinstance(report, Report)
    lines = [
        f"seed {report.seed}: {counted(report.trained, 'row')} in {report.virtual_s:.0f} virtual s,"
        f" {report.events} events {report.trace_hash}"
    ]
    lines += [f"  PROBLEM {problem}" for problem in report.problems[:5]]
    return "\n".join(lines)


if __name__ == "__main__":
    simulate()
