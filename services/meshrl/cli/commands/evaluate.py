"""`meshrl eval`: score a checkpoint on held-out prompts, in this process."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from meshrl.cli.options import PATH, Finite, json_option, recipe_argument
from meshrl.common.files import replace_file
from meshrl.common.plain_text import counted, one_line, say, say_json
from meshrl.config import Recipe, load_recipe
from meshrl.config.recipe import has_evaluation
from meshrl.contract.errors import UserError
from meshrl.launcher.text_console import text_console
from meshrl.rewardd.estimates import Estimate

if TYPE_CHECKING:
    from meshrl.launcher.evaluation import EvaluationReport


@click.command("eval")
@recipe_argument
@click.option(
    "--checkpoint",
    type=PATH,
    help="A Hugging Face directory, or a checkpoint of a run; model.path if not given.",
)
@click.option("--out", type=PATH, help="Write every answer to this file, a JSON object per line.")
@click.option("--force", is_flag=True, help="Replace the file of --out if it exists.")
@click.option(
    "--right",
    type=Finite(),
    default=1.0,
    show_default=True,
    help="The least score of a right answer, for pass@k and majority@k.",
)
@click.option(
    "--worst",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="How many of the answers with the lowest scores to show.",
)
@json_option
def evaluate(
    recipe: Path,
    overrides: tuple[str, ...],
    checkpoint: Path | None,
    out: Path | None,
    force: bool,
    right: float,
    worst: int,
    as_json: bool,
) -> None:
    """Answer RECIPE's data.val_files with a checkpoint and score the answers with its reward."""
    loaded = load_recipe(recipe, overrides, sections=("model", "rollout", "reward"))
    if not has_evaluation(loaded):
        raise UserError(
            f"{recipe}: data.val_files is empty; want held-out parquet or jsonl files, or data.reasoning_gym"
        )
    source = checkpoint if checkpoint is not None else loaded.model.path
    if out is not None:
        _check_target(out, force)
    # Imported here: with it comes torch, and a wrong recipe should be answered at once.
    from meshrl.launcher.evaluation import evaluate as run
    from meshrl.launcher.prompts import eval_tasks

    tasks = eval_tasks(loaded)
    rows = sum(task.group_size for task in tasks)
    with _as_model(loaded, source) as model, _progress(rows) as answered:
        report = asyncio.run(run(loaded, model, tasks, right=right, answered=answered))
    if out is not None:
        lines = (json.dumps(asdict(answer), ensure_ascii=False) for answer in report.answers)
        text = "".join(f"{line}\n" for line in lines)
        replace_file(out, text.encode(errors="replace"), private=True)
    if as_json:
        shown = asdict(replace(report, answers=())) | {"checkpoint": str(source)}
        del shown["answers"]
        say_json(json.dumps(shown, indent=2))
        return
    console = text_console()
    console.print(_table(source, report))
    if len(report.sources) > 1:
        console.print(_sources(report))
    _print_worst(console, report, worst)
    if out is not None:
        say(f"{counted(len(report.answers), 'answer')} in {out}")


def _check_target(out: Path, force: bool) -> None:
    """Before anything is answered."""
    if out.is_dir() or not out.parent.is_dir():
        raise UserError(f"--out {out}: want a file in a directory that exists")
    if out.exists() and not force:
        raise UserError(f"--out {out} already exists; choose another, or give --force")


@contextmanager
def _progress(rows: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, on a terminal."""
    console = text_console(sys.stderr)
    columns = (
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        "left",
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        answering = bar.add_task("answers", total=rows)

        def answered(count: int) -> None:
            bar.update(answering, completed=count, description="scores" if count == rows else None)

        yield answered


@contextmanager
def _as_model(recipe: Recipe, source: Path) -> Iterator[Path]:
    """The Hugging Face directory of `source`: itself, or an export of a run's checkpoint."""
    if not source.is_dir():
        raise UserError(f"no such checkpoint: {source}")
    if (source / "config.json").is_file():
        yield source
        return
    from meshrl.trainer.checkpoint.export import export_checkpoint

    with tempfile.TemporaryDirectory(prefix="meshrl-eval-") as scratch:
        yield export_checkpoint(
            source,
            Path(scratch) / "model",
            model=recipe.model.path,
            tokenizer=recipe.tokenizer_dir,
        )


def _table(source: Path, report: EvaluationReport) -> Table:
    table = Table(title=f"{source}", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column()
    low, high = report.interval or (0.0, 0.0)
    table.add_row(
        "score",
        "none" if report.score is None else f"{report.score:.4f}  [{low:.4f}, {high:.4f}]",
    )
    for k, found in report.pass_at.items():
        table.add_row(f"pass@{k}", _interval(found))
    for k, found in report.majority_at.items():
        if k > 2:  # of one or two answers none is in the majority
            table.add_row(f"majority@{k}", _interval(found))
    for name, value in report.components.items():
        table.add_row(f"  {name}", f"{value:.4f}")
    table.add_row("prompts", f"{report.tasks:,} ({counted(report.rows, 'answer')})")
    table.add_row("length", f"{report.length:.1f} tokens, {report.truncated:.1%} cut short")
    for reason, rows in report.unscored.items():
        table.add_row("not scored", f"{rows:,}: {reason}")
    table.caption, table.caption_justify = "[low, high]: 95 %, bootstrapped over prompts", "left"
    return table


def _sources(report: EvaluationReport) -> Table:
    table = Table(title="by data source", title_justify="left")
    table.add_column("source")
    k = max(report.pass_at, default=1)
    for name in ("prompts", "score", f"pass@{k}"):
        table.add_column(name, justify="right")
    for source, found in report.sources.items():
        table.add_row(
            Text(source or "none"),
            f"{found.tasks:,}",
            _interval(found.score),
            _interval(found.pass_at.get(k)),
        )
    return table


def _interval(found: Estimate | None) -> str:
    return "none" if found is None else f"{found.mean:.4f}  [{found.low:.4f}, {found.high:.4f}]"


def _print_worst(console: Console, report: EvaluationReport, count: int) -> None:
    """Print the answers with the lowest scores, each in three lines."""
    scored = [answer for answer in report.answers if answer.score is not None]
    for answer in sorted(scored, key=lambda answer: answer.score or 0.0)[:count]:
        wanted = "" if answer.ground_truth is None else f", wanted {answer.ground_truth}"
        prompt = answer.messages[-1].content if answer.messages else ""
        lines = {f"{answer.score:.3f}": f"task {answer.task}{wanted}"}
        lines |= {"  prompt": prompt, "  answer": answer.response}
        for name, value in lines.items():
            text = Text(f"{name:<9} ", style="dim") + Text(one_line(value))
            text.truncate(console.width, overflow="ellipsis")
            console.print(text)
