"""`meshrl eval`: score a checkpoint on held-out prompts, in this process."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from meshrl.cli.options import PATH, json_option, recipe_argument
from meshrl.config import Recipe, load_recipe
from meshrl.contract.errors import UserError

if TYPE_CHECKING:
    from meshrl.launcher.evaluation import Report


@click.command("eval")
@recipe_argument
@click.option(
    "--checkpoint",
    type=PATH,
    help="A Hugging Face directory, or a checkpoint of a run; model.path if not given.",
)
@json_option
def evaluate(
    recipe: Path, overrides: tuple[str, ...], checkpoint: Path | None, as_json: bool
) -> None:
    """Answer RECIPE's data.val_files with a checkpoint and score the answers with its reward."""
    loaded = load_recipe(recipe, overrides, sections=("model", "rollout", "reward"))
    if not loaded.data.val_files:
        raise UserError(f"{recipe}: data.val_files is empty; want held-out parquet or jsonl files")
    source = checkpoint if checkpoint is not None else loaded.model.path
    # Imported here: with it comes torch, and a wrong recipe should be answered at once.
    from meshrl.launcher.evaluation import evaluate as run
    from meshrl.launcher.prompts import eval_tasks

    tasks = eval_tasks(loaded)
    with _as_model(loaded, source) as model:
        report = asyncio.run(run(loaded, model, tasks))
    if as_json:
        click.echo(json.dumps(asdict(report) | {"checkpoint": str(source)}, indent=2))
    else:
        Console(highlight=False).print(_table(source, report))


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


def _table(source: Path, report: Report) -> Table:
    table = Table(title=f"{source}", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column()
    table.add_row("score", "none" if report.score is None else f"{report.score:.4f}")
    if len(report.by_source) > 1:
        for name, score in report.by_source.items():
            table.add_row(f"  {name or 'no source'}", f"{score:.4f}")
    for name, value in report.components.items():
        table.add_row(f"  {name}", f"{value:.4f}")
    table.add_row("prompts", f"{report.tasks:,} ({report.rows:,} answers)")
    table.add_row("length", f"{report.length:.1f} tokens, {report.truncated:.1%} cut short")
    for reason, rows in report.unscored.items():
        table.add_row("not scored", f"{rows:,}: {reason}")
    return table
