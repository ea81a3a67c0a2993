"""`meshrl sft`, `dpo` and `train-reward`: learn from stored rows and preferences, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshrl.cli.options import json_option, recipe_argument
from meshrl.common.plain_text import counted, say, say_json
from meshrl.config.loading import Written
from meshrl.trainer.offline.config import DpoConfig, RewardModelConfig, SftConfig

if TYPE_CHECKING:
    from meshrl.trainer.offline.loop import OfflineProgress


@click.command()
@recipe_argument
@json_option
def sft(recipe: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Fine-tune on prompt/response rows as RECIPE says (keys: see meshrl.trainer.offline.config.SftConfig)."""
    config = Written.read(recipe, overrides).with_local_paths().as_config(SftConfig)
    # Imported here: with it comes torch, and a wrong recipe should be answered at once.
    from meshrl.trainer.offline.sft import run

    def report(progress: OfflineProgress) -> None:
        if as_json:
            shown = {"loss": progress.loss, "exact_match": progress.exact_match, **asdict(progress)}
            del shown["numbers"]
            say_json(json.dumps(shown))
            return
        match = "" if progress.exact_match is None else f"  exact match {progress.exact_match:.3f}"
        say(
            f"step {progress.step}/{progress.steps}  loss {progress.loss:.4f}  "
            f"{progress.tokens_per_s:,.0f} tokens/s{match}"
        )

    _say_end(config.output_dir, run(config, report), as_json)


@click.command()
@recipe_argument
@json_option
def dpo(recipe: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Train a policy on prompt/chosen/rejected rows as RECIPE says (keys: meshrl.trainer.offline.config.DpoConfig).

    The same command resumes from the newest checkpoint.
    """
    config = Written.read(recipe, overrides).with_local_paths().as_config(DpoConfig)
    # Imported here: with it comes torch, and a wrong recipe should be answered at once.
    from meshrl.trainer.offline.dpo import run

    _say_end(config.output_dir, run(config, _reporter(as_json)), as_json)


@click.command("train-reward")
@recipe_argument
@json_option
def train_reward(recipe: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Train a reward model on such rows (keys: meshrl.trainer.offline.config.RewardModelConfig).

    `reward.judges: [{kind: model, options: {path: OUTPUT_DIR}}]` scores rows with it. The same command
    resumes from the newest checkpoint.
    """
    config = Written.read(recipe, overrides).with_local_paths().as_config(RewardModelConfig)
    # Imported here: with it comes torch, and a wrong recipe should be answered at once.
    from meshrl.trainer.offline.reward_training import run

    _say_end(config.output_dir, run(config, _reporter(as_json)), as_json)


def _reporter(as_json: bool) -> Callable[[OfflineProgress], None]:
    def report(progress: OfflineProgress) -> None:
        if as_json:
            say_json(json.dumps(asdict(progress)))
            return
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in progress.numbers.items())
        speed = f"{progress.tokens_per_s:,.0f} tokens/s"
        say(f"step {progress.step}/{progress.steps}  {numbers}  {speed}")

    return report


def _say_end(target: Path, done: OfflineProgress, as_json: bool) -> None:
    if not as_json:
        say(f"{target} after {counted(done.step, 'step')}, {done.seconds:.1f} s")
