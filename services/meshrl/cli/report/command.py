"""`meshrl report` writes a page about a run; `meshrl plot` draws its metrics. Both read the run's files."""

from __future__ import annotations

import difflib
import time
from operator import methodcaller
from pathlib import Path

import click
from rich.text import Text

from meshrl.api.history import HELD_OUT, STEP, RunHistory
from meshrl.api.rows import Row, find_rows
from meshrl.cli.find_mesh import mesh_of
from meshrl.cli.options import PATH, RUN, completed
from meshrl.cli.report.charts import Chart, ChartLine, braille, save
from meshrl.cli.report.page import RunReport, page
from meshrl.common.files import replace_file
from meshrl.common.plain_text import say
from meshrl.config.recipe import RECIPE_NAME
from meshrl.contract.errors import MeshError, UserError
from meshrl.contract.types import Ledger
from meshrl.http.view.settings import compared
from meshrl.launcher.address_book import newest_run_dir
from meshrl.launcher.text_console import text_console

REPORT_NAME = "report.html"
SAMPLES = 4
"""Best and worst rows of the newest step, each."""
ROWS = 10
"""Lines of a chart on a terminal."""
PLAIN_WIDTH = 80


@click.command()
@click.argument("run", type=RUN, required=False, envvar="MESHRL_RUN_DIR")
@click.option(
    "--out", type=PATH, help=f"The file; {REPORT_NAME} in the run's directory if not given."
)
def report(run: Path | None, out: Path | None) -> None:
    """Write one HTML file about RUN, a run's directory (the newest one here if not given).

    Curves, ledger, the best and worst answers, the recipe. It needs nothing beside it, and may be sent to somebody.
    """
    directory, history = _history(run)
    ledgers, why = _ledgers(directory)
    made = RunReport(
        history=history,
        ledgers=ledgers,
        no_ledger=why,
        settings=compared(directory, None) if (directory / RECIPE_NAME).exists() else [],
        samples=_samples(directory),
        made_unix_s=time.time(),
    )
    path = out or directory / REPORT_NAME
    replace_file(path, page(made), private=True)
    say(str(path))


@click.command()
@click.argument("run", type=RUN)
@click.argument("metrics", nargs=-1, metavar="[METRIC]...", shell_complete=completed("metrics"))
@click.option("--with", "others", type=RUN, multiple=True, help="Another run, over this one.")
@click.option("--out", type=PATH, help="A picture: .svg, or .png and others by matplotlib.")
@click.option("--log", is_flag=True, help="Logarithmic values.")
@click.option("--list", "listed", is_flag=True, help="Name the metrics that RUN has.")
def plot(
    run: Path,
    metrics: tuple[str, ...],
    others: tuple[Path, ...],
    out: Path | None,
    log: bool,
    listed: bool,
) -> None:
    """Draw METRICs of RUN, a run's directory, on the terminal or as a picture; reward and score if none is named."""
    histories = [_history(path)[1] for path in (run, *others)]
    known = histories[0].metrics.names
    if listed:
        for name in known:
            say(name)
        return
    chosen = metrics or tuple(name for name in (STEP, HELD_OUT) if name in known)
    for name in chosen:
        if not any(name in one.metrics.names for one in histories):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{run} has no metric {name!r}{hint} (meshrl plot {run} --list)")
    charts = [Chart(title=name, curves=_curves(histories, name), log=log) for name in chosen]
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        save(charts, out)
        say(str(out))
        return
    console = text_console()
    width = console.width if console.is_terminal else PLAIN_WIDTH
    for chart in charts:
        for line in braille(chart, width, ROWS):
            console.print(Text.assemble(*line), width=width)


def _history(run: Path | None) -> tuple[Path, RunHistory]:
    directory = run if run is not None else newest_run_dir()
    history = RunHistory.read(directory)
    if not history.metrics.names:
        raise UserError(
            f"{directory}: no figures of a run there: {history.metrics.problem or 'no line yet'}"
        )
    return directory, history


def _curves(histories: list[RunHistory], metric: str) -> list[ChartLine]:
    """Of one metric, a curve per run."""
    found = []
    for history in histories:
        curve = history.metrics.curves((metric,)).get(metric)
        if curve is not None:
            found.append(ChartLine(str(history.directory), curve.steps, curve.values))
    return found


def _ledgers(directory: Path) -> tuple[list[Ledger], str]:
    """Of training and evaluation, or why there is none: a report of a copy has no queue to ask."""
    try:
        mesh = mesh_of(directory, stopped=True)
    except MeshError as error:
        return [], f"No ledger: {error}"
    found = []
    for name in mesh.runs:
        try:
            found.append(mesh.ask_queue(methodcaller("ledger", name)))
        except MeshError as error:
            if not found:
                return [], f"No ledger: {error}"
    return found, ""


def _samples(directory: Path) -> dict[str, list[Row]]:
    """The best and the worst of the newest step and the newest evaluation; nothing where no rows are logged."""
    found: dict[str, list[Row]] = {}
    for held_out in (False, True):
        for order in ("worst", "best"):
            try:
                rows = list(find_rows(directory, order=order, held_out=held_out, most=SAMPLES))
            except UserError:
                continue
            if rows:
                kind = "held out" if held_out else "trained"
                found[f"{order.capitalize()} of step {rows[0]['step']}, {kind}"] = rows
    return found
