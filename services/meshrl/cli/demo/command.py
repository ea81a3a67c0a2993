"""`meshrl demo`: prepare, train with `up`, report."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshrl.cli.options import overrides_argument, preload_option
from meshrl.cli.recipe_files import DEMO, recipes
from meshrl.common.plain_text import say
from meshrl.config import load_recipe
from meshrl.config.loading import load_run
from meshrl.contract.errors import MeshError, UserError
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, LOCK_NAME, AddressBook, run_lock
from meshrl.launcher.preloading import preloading
from meshrl.launcher.text_console import text_console

if TYPE_CHECKING:
    from meshrl.config.recipe import Recipe
    from meshrl.contract.types import Ledger
    from meshrl.trainer.offline.sft import SftProgress


@click.command()
@overrides_argument
@click.option("--plain", is_flag=True, help="Print lines instead of the live view.")
@click.option("--only-prepare", is_flag=True, help="Make the model and its prompts, and stop.")
@preload_option
def demo(overrides: tuple[str, ...], plain: bool, only_prepare: bool, preload: bool) -> None:
    """Make a tiny model, warm it up, and let it learn by RL that thinking pays.

    Every run starts afresh under runs/demo, but for the warm-started model, which is kept. Results:
    runs/demo/summary.json, curves.png and export/.
    """
    file = recipes() / DEMO
    reward = json.dumps(str(file.with_name("reward.py")))  # wherever meshrl is installed
    overrides = (f"reward.custom_reward_function.path={reward}", *overrides)
    recipe = load_recipe(file, overrides, check=False)
    directory = recipe.run.path
    directory.mkdir(parents=True, exist_ok=True)
    # Held until the model is made: neither a running mesh nor another demo may lose its files.
    with run_lock(directory):
        if not only_prepare:
            _start_afresh(directory, recipe.model.path)
        # Imported here: with them come gRPC and torch, and `--help` should answer at once.
        from meshrl.cli.demo.prepare import prepare
        from meshrl.launcher.up import up

        say("demo: a tiny model, its prompts and a short supervised warm start")
        prepare(recipe.model.path.parent, seed=recipe.run.seed, report=_show_warm_start)
    if only_prepare:
        return
    with preloading(preload) as preloaders:
        loaded = load_recipe(file, overrides)
        code = up(loaded, fixed_ports={}, plain=plain, preloading=preloaders)
    if code == 0:
        _report(recipe)
    sys.exit(code)


def _start_afresh(directory: Path, model: Path) -> None:
    """Remove what an earlier demo left, but not the model that it made, nor the lock that the caller holds.

    Raises:
        UserError: something else is in the directory.
    """
    present = [path for path in directory.iterdir() if path.name not in ("assets", LOCK_NAME)]
    if present and not _is_a_demos(directory, model):
        raise UserError(
            f"{directory} is not the directory of a demo (it has {present[0].name}): it would be emptied;"
            " choose another run.dir"
        )
    for path in present:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _is_a_demos(directory: Path, model: Path) -> bool:
    """Whether the run that this directory belongs to trained the demo's model."""
    try:
        recipe = AddressBook.load(directory / ADDRESS_BOOK_NAME).recipe
        return load_run(recipe).model.path.resolve() == model.resolve()
    except MeshError:
        return False


def _show_warm_start(phase: str, progress: SftProgress) -> None:
    if progress.exact_match is None and progress.step % 50 and progress.step != progress.steps:
        return
    match = "" if progress.exact_match is None else f", exact match {progress.exact_match:.2f}"
    say(
        f"  {phase}: step {progress.step}/{progress.steps}, loss {progress.loss:.3f}{match},"
        f" {progress.tokens_per_s:,.0f} tokens/s"
    )


def _report(recipe: Recipe) -> None:
    from meshrl.cli.demo.report import History, draw_curves, summary, table

    directory = recipe.run.path
    try:
        history = History.read(recipe.metrics_path)
    except UserError as error:  # the run itself ended well
        say(str(error))
        return
    ledger = asyncio.run(_stored_ledger(recipe))
    shown = summary(history, ledger, directory / "export")
    (directory / "summary.json").write_text(json.dumps(shown, indent=2) + "\n")
    curves = draw_curves(history, directory / "curves.png")
    text_console().print(table(shown, history))
    say(f"{directory / 'summary.json'}\n{curves}\n{directory / 'export'}", lines=True)


async def _stored_ledger(recipe: Recipe) -> Ledger:
    """The ledger as the queue's files tell it, after the queue has ended."""
    from meshrl.rpc.queue_connection import open_stored_queue

    async with open_stored_queue(recipe) as queue:
        return await queue.ledger(recipe.run.name)
