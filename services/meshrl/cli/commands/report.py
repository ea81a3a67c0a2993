"""`meshrl report` writes a page about a run; `meshrl plot` draws its metrics. Both read the run's files."""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from meshrl.api import HELD_OUT, STEP, Row, RunHistory, find_rows, prompt_of, said_in
from meshrl.cli.charts import Chart, ChartLine, braille, save, svg
from meshrl.cli.commands.queue import ledger_rows
from meshrl.cli.find_mesh import mesh_of
from meshrl.cli.options import PATH, RUN, NamedRun, checked_run, names_run
from meshrl.common.files import replace_file
from meshrl.common.plain_text import counted, say
from meshrl.config.recipe import RECIPE_NAME
from meshrl.contract.errors import MeshError, UserError
from meshrl.contract.types import Ledger
from meshrl.http.view.settings import compared
from meshrl.launcher.text_console import text_console
from meshrl.launcher.view import clock

PANELS: Mapping[str, Sequence[str]] = {
    "reward": (STEP, HELD_OUT),
    "response length, tokens": ("response/length_mean", "val/response_length"),
    "entropy": ("actor/entropy",),
    "KL to the reference": ("actor/kl_loss",),
    "share of clipped tokens": ("actor/pg_clipfrac",),
    "gradient norm": ("actor/grad_norm",),
    "mismatch of trainer and engine, log-prob": ("mismatch/logprob_abs_mean",),
    "staleness, steps": ("staleness/mean",),
    "rows in groups of equal rewards": ("advantages/rows_in_equal_groups",),
    "tokens trained a second": ("throughput/tokens_per_s",),
    "seconds of a step": ("time/step_s", "time/waiting_s", "time/training_s"),
}
"""Title of a chart to its metrics."""
STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #777; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 980px; padding: 16px; }
h1 { font-size: 1.4rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .5rem; }
table { border-collapse: collapse; }
td { border-bottom: 1px solid var(--line); padding: 2px 12px 2px 0; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } .dim { color: var(--dim); }
.charts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); }
.charts svg { height: auto; width: 100%; }
pre { background: #8881; margin: 4px 0 10px; overflow-wrap: anywhere; padding: 8px; white-space: pre-wrap; }
summary { cursor: pointer; } .wide { overflow-x: auto; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The content of the page."""

    history: RunHistory
    ledgers: Sequence[Ledger]
    no_ledger: str
    """Why there is none; empty where there are ledgers."""
    settings: Sequence[Mapping[str, Any]]
    """Keys of the recipe, as `meshrl.http.view.settings.compared` gives them."""
    samples: Mapping[str, Sequence[Row]]
    """Title to rows."""
    made_unix_s: float


def page(report: RunReport) -> str:
    """The HTML."""
    history = report.history
    body = [
        f"<h1>Run {escape(history.name)}</h1>",
        f'<p class="dim">{escape(str(history.directory))}, {history.state} at step {history.steps:,};'
        f" written {datetime.fromtimestamp(report.made_unix_s):%Y-%m-%d %H:%M}</p>",
        _table(_figures(history)),
        "<h2>Curves</h2>",
        f'<div class="charts">{"".join(map(svg, charts(history)))}</div>',
        "<h2>Ledger</h2>",
        *(_ledger(ledger) for ledger in report.ledgers),
        f"<p>{escape(report.no_ledger)}</p>" if report.no_ledger else "",
        "<h2>Samples</h2>",
        *(_samples(title, rows) for title, rows in report.samples.items()),
        "" if report.samples else "<p>No rows are logged (trainer.log_rows).</p>",
        "<h2>Recipe</h2>",
        _settings(report.settings),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(history.name)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def charts(history: RunHistory) -> list[Chart]:
    """One per panel that the run has figures of."""
    found = []
    for title, metrics in PANELS.items():
        curves = [
            ChartLine(name, curve.steps, curve.values)
            for name, curve in history.metrics.curves(metrics).items()
        ]
        if any(curve.values for curve in curves):
            found.append(Chart(title=title, curves=curves))
    return found


def _figures(history: RunHistory) -> list[tuple[str, str]]:
    found = [
        ("steps", f"{history.steps:,}"),
        ("rows trained", f"{history.samples:,}"),
        ("time", f"{clock(history.seconds)}, from the first figures to the last"),
    ]
    for label, metric in (("reward", STEP), ("held-out score", HELD_OUT)):
        values = history.values(metric)
        if values:
            ends = f"{values[0]:.3f} → {values[-1]:.3f}"
            found.append((label, f"{ends}, best {max(values):.3f}"))
    if history.metrics.problem:
        found.append(("figures", history.metrics.problem))
    return found


def _ledger(ledger: Ledger) -> str:
    cells = "".join(
        f'<tr><td>{escape(label)}</td><td>{escape(why)}</td><td class="n">{count:,}</td></tr>'
        for label, why, count in ledger_rows(ledger)
        if count
    )
    state = "balanced" if ledger.balanced else "NOT BALANCED"
    return f"<p>{escape(ledger.run)}: {state}</p><table>{cells}</table>"


def _samples(title: str, rows: Sequence[Row]) -> str:
    return f"<h3>{escape(title)}</h3>" + "".join(map(_sample, rows))


def _sample(row: Row) -> str:
    components = ", ".join(
        f"{name} {value:.4g}" for name, value in row["reward_components"].items()
    )
    facts = [
        f"reward {_number(row['reward'])}",
        f"advantage {_number(row['advantage'])}" if row["advantage"] is not None else "",
        components,
        counted(row["length"], "token"),
        f"staleness {row['staleness']}" if row["staleness"] is not None else "",
        str(row["uid"]),
    ]
    judged = ((f"{name}, by the judge", text) for name, text in row["reward_texts"].items())
    said = "".join(
        f'<p class="dim">{escape(title)}</p><pre>{escape(text)}</pre>'
        for title, text in (("prompt", prompt_of(row)), *said_in(row), *judged)
    )
    summary = escape(" · ".join(filter(None, facts)))
    return f"<details open><summary>{summary}</summary>{said}</details>"


def _settings(entries: Iterable[Mapping[str, Any]]) -> str:
    every = list(entries)
    changed = [(one["key"], one["value"]) for one in every if one["changed"]]
    whole = [
        (one["key"], json.dumps(None) if one["value"] is None else one["value"]) for one in every
    ]
    return (
        f'<p>What differs from the defaults:</p><div class="wide">{_table(changed)}</div>'
        f'<details><summary>all keys</summary><div class="wide">{_table(whole)}</div></details>'
    )


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in rows)
    return f"<table>{cells}</table>"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


REPORT_NAME = "report.html"
SAMPLES = 4
"""Best and worst rows of the newest step, each."""
ROWS = 10
"""Lines of a chart on a terminal."""
PLAIN_WIDTH = 80


@click.command()
@names_run()
@click.option(
    "--out", type=PATH, help=f"The file; {REPORT_NAME} in the run's directory if not given."
)
def report(named: NamedRun, out: Path | None) -> None:
    """Write one HTML file about RUN (the newest one here if not given).

    Curves, ledger, the best and worst answers, the recipe; it needs no other file.
    """
    directory = named.directory
    history = _history(directory)
    ledgers, why = _ledgers(directory)
    made = RunReport(
        history=history,
        ledgers=ledgers,
        no_ledger=why,
        settings=compared(directory, None) if (directory / RECIPE_NAME).exists() else [],
        samples=_logged_samples(directory),
        made_unix_s=time.time(),
    )
    path = out or directory / REPORT_NAME
    replace_file(path, page(made), private=True)
    say(str(path))


@click.command()
@click.argument("run", type=RUN)
@click.argument("metrics", nargs=-1, metavar="[METRIC]...")
@click.option("--with", "others", type=RUN, multiple=True, help="Another run, over this one.")
@click.option("--out", type=PATH, help="A picture, as SVG.")
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
    """Draw METRICs of RUN on the terminal or as a picture; reward and score if none is named."""
    histories = [_history(checked_run(path)) for path in (run, *others)]
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


def _history(directory: Path) -> RunHistory:
    history = RunHistory.read(directory)
    if not history.metrics.names:
        raise UserError(
            f"{directory}: no figures of a run there: {history.metrics.problem or 'no line yet'}"
        )
    return history


def _curves(histories: list[RunHistory], metric: str) -> list[ChartLine]:
    """A curve per run, all of one metric."""
    found = []
    for history in histories:
        curve = history.metrics.curves((metric,)).get(metric)
        if curve is not None:
            found.append(ChartLine(str(history.directory), curve.steps, curve.values))
    return found


def _ledgers(directory: Path) -> tuple[list[Ledger], str]:
    """Ledgers of training and evaluation, or why there is none: a report of a copy has no queue to ask."""
    try:
        mesh = mesh_of(directory, stopped=True)
        return mesh.ask_queue(mesh.ledgers), ""
    except MeshError as error:
        return [], f"No ledger: {error}"


def _logged_samples(directory: Path) -> dict[str, list[Row]]:
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
