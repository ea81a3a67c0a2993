"""`meshrl demo`: prepare, train with `up`, report."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from meshrl.cli.charts import Chart, ChartLine, save
from meshrl.cli.commands.init import DEMO, recipes
from meshrl.cli.options import overrides_argument, preload_option
from meshrl.common.files import make_private
from meshrl.common.plain_text import counted, say
from meshrl.config import load_recipe
from meshrl.config.loading import load_run
from meshrl.contract.errors import MeshError, UserError
from meshrl.contract.types import Json, Ledger
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, LOCK_NAME, AddressBook, run_lock
from meshrl.launcher.preloading import preloading
from meshrl.launcher.text_console import text_console

if TYPE_CHECKING:
    from meshrl.config.recipe import Recipe
    from meshrl.trainer.offline.loop import OfflineProgress


@click.command()
@overrides_argument
@click.option("--plain", is_flag=True, help="Print lines instead of the live view.")
@click.option("--only-prepare", is_flag=True, help="Make the model and its prompts, and stop.")
@preload_option
def demo(overrides: tuple[str, ...], plain: bool, only_prepare: bool, preload: bool) -> None:
    """Make a tiny model, warm it up, and let it learn by RL that thinking pays.

    Every run starts afresh under runs/demo, but for the warm-started model, which is kept. Results:
    runs/demo/summary.json, curves.svg and export/.
    """
    file = recipes() / DEMO
    reward = json.dumps(str(file.with_name("reward.py")))  # wherever meshrl is installed
    overrides = (f"reward.custom_reward_function.path={reward}", *overrides)
    recipe = load_recipe(file, overrides, check=False)
    directory = recipe.run.path
    make_private(directory, "run.dir")
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


def _show_warm_start(phase: str, progress: OfflineProgress) -> None:
    if progress.exact_match is None and progress.step % 50 and progress.step != progress.steps:
        return
    match = "" if progress.exact_match is None else f", exact match {progress.exact_match:.2f}"
    say(
        f"  {phase}: step {progress.step}/{progress.steps}, loss {progress.loss:.3f}{match},"
        f" {progress.tokens_per_s:,.0f} tokens/s"
    )


def _report(recipe: Recipe) -> None:
    directory = recipe.run.path
    try:
        history = DemoHistory.read(recipe.metrics_path)
    except UserError as error:  # the run itself ended well
        say(str(error))
        return
    # Imported here: with it comes gRPC, and `--help` should answer at once.
    from meshrl.cli.find_mesh import mesh_of

    mesh = mesh_of(directory, stopped=True)
    ledger = mesh.ask_queue(mesh.ledgers)[0]
    shown = summary(history, ledger, directory / "export")
    (directory / "summary.json").write_text(json.dumps(shown, indent=2) + "\n")
    curves = directory / "curves.svg"
    draw_curves(history, curves)
    text_console().print(table(shown, history))
    say(f"{directory / 'summary.json'}\n{curves}\n{directory / 'export'}", lines=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoHistory:
    """metrics.jsonl, read back."""

    steps: tuple[Mapping[str, Any], ...]
    """One object per training step."""
    evaluations: tuple[Mapping[str, Any], ...]
    """One object per evaluation, the first one before training."""

    @classmethod
    def read(cls, path: Path) -> DemoHistory:
        """Raises UserError when the run is too short to compare before with after."""
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        steps = tuple(line for line in lines if "reward/mean" in line)
        evaluations = tuple(line for line in lines if "val/score/mean" in line)
        if not steps or len(evaluations) < 2:
            raise UserError(
                f"{path} has {counted(len(steps), 'step')} and {counted(len(evaluations), 'evaluation')}: no curves"
                " without a step between two evaluations (trainer.val_before_train, trainer.test_freq)"
            )
        return cls(steps=steps, evaluations=evaluations)

    @property
    def began(self) -> float:
        """Unix time at which the first step's wait for a batch began."""
        first = self.steps[0]
        return float(first["time/unix_s"] - first["time/step_s"])

    @property
    def rl_seconds(self) -> float:
        """Wall-clock seconds from the first wait for a batch to the last optimizer step."""
        return float(self.steps[-1]["time/unix_s"] - self.began)

    @property
    def staleness(self) -> Counter[int]:
        """Trained rows by staleness."""
        rows: Counter[int] = Counter()
        for step in self.steps:
            for staleness, count in step["staleness/histogram"].items():
                rows[int(staleness)] += count
        return rows


def summary(history: DemoHistory, ledger: Ledger, export: Path) -> dict[str, Json]:
    """The content of `runs/demo/summary.json`."""
    first, last = history.evaluations[0], history.evaluations[-1]
    return {
        "accuracy_before": first["val/score/mean"],
        "accuracy_after": last["val/score/mean"],
        "rl_seconds": round(history.rl_seconds, 2),
        "steps": len(history.steps),
        "samples": sum(int(step["batch/rows"]) for step in history.steps),
        "tokens": sum(int(step["batch/tokens"]) for step in history.steps),
        "staleness": _spread(history.staleness),
        "ledger": asdict(ledger) | {"balanced": ledger.balanced},
        "versions": {
            "first": first["val/version"],
            "last": last["val/version"],
            "published": len(history.steps) + 1,
        },
        "thinking_before": first["val/component/thinks"],
        "thinking_after": last["val/component/thinks"],
        "export": str(export),
    }


def _spread(rows: Counter[int]) -> dict[str, float]:
    ordered = sorted(rows.elements())
    return {
        "mean": round(sum(ordered) / len(ordered), 4),
        "p95": ordered[math.ceil(0.95 * len(ordered)) - 1],
        "max": ordered[-1],
    }


def table(shown: Mapping[str, Any], history: DemoHistory) -> Table:
    """The summary for a person."""
    first, last = history.evaluations[0], history.evaluations[-1]
    made = Table(title="What the model learned", title_justify="left")
    made.add_column("held-out programs, greedy")
    made.add_column("before", justify="right")
    made.add_column("after", justify="right")
    for label, key, form in (
        ("accuracy", "val/score/mean", "{:.3f}"),
        ("share of answers that think first", "val/component/thinks", "{:.3f}"),
        ("mean response, tokens", "val/response_length", "{:.1f}"),
        ("a sample", "val/sample", "{}"),
    ):
        made.add_row(label, form.format(first[key]), form.format(last[key]))
    stale = shown["staleness"]
    made.caption = (
        f"{shown['steps']} steps, {shown['samples']} samples, {shown['tokens']} tokens in"
        f" {shown['rl_seconds']:.1f} s of RL; staleness mean {stale['mean']:.2f}, p95 {stale['p95']},"
        f" max {stale['max']}; ledger {'balanced' if shown['ledger']['balanced'] else 'NOT BALANCED'}"
    )
    return made


def draw_curves(history: DemoHistory, path: Path) -> None:
    """Accuracy, share of thinking and response length over seconds of RL, as SVG."""
    trained = _over_time(history, history.steps)
    held_out = _over_time(history, history.evaluations)
    charts = []
    for title, sampled, greedy in (
        ("accuracy", "reward/mean", "val/score/mean"),
        ("share of thinking", "reward_component/thinks", "val/component/thinks"),
        ("response length, tokens", "response/length_mean", "val/response_length"),
    ):
        in_training = [step[sampled] for step in history.steps]
        values = [evaluation[greedy] for evaluation in history.evaluations]
        curves = [
            ChartLine("sampled, in training", trained, in_training),
            ChartLine("greedy, held out", held_out, values),
        ]
        charts.append(Chart(title=f"{title}, over seconds of RL", curves=curves))
    save(charts, path)


def _over_time(history: DemoHistory, lines: Sequence[Mapping[str, Any]]) -> list[float]:
    return [max(0.0, line["time/unix_s"] - history.began) for line in lines]
