"""`meshrl replay`: do a run's logged rows and its weights give what it logged? On one CPU process, from its files."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import click

from meshrl.cli.find_mesh import say_which
from meshrl.cli.options import RUN, Finite, json_option
from meshrl.common.plain_text import counted, say, say_json
from meshrl.config.loading import load_run
from meshrl.config.recipe import Recipe
from meshrl.contract.errors import UserError
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, AddressBook, newest_run_dir
from meshrl.rpc.exit_codes import Exit
from meshrl.trainer.trajectories.files import FOLDER

TOLERANCE = 1e-6


@click.command()
@click.argument("run", type=RUN, required=False, envvar="MESHRL_RUN_DIR")
@click.option("--step", type=click.IntRange(min=0), required=True, help="As in metrics.jsonl.")
@click.option(
    "--tolerance",
    type=Finite(min=0),
    default=TOLERANCE,
    show_default=True,
    help="The largest relative difference that counts as the same.",
)
@json_option
def replay(run: Path | None, step: int, tolerance: float, as_json: bool) -> None:
    """Compute a step of RUN again, a run's directory (the newest one here if not given), and compare.

    From the newest checkpoint before it, through the logged rows: log-probs, advantages, loss, gradient norm.
    The first row that differs is named, and the exit code is 1.
    """
    directory = run if run is not None else newest_run_dir()
    address_book = AddressBook.load(directory / ADDRESS_BOOK_NAME)
    say_which(directory, address_book.run)
    recipe = load_run(address_book.recipe)
    _refuse(recipe)
    # Imported here: with it comes torch.
    import torch

    from meshrl.launcher.learner import build_learner, training_steps
    from meshrl.trainer.checkpoint import checkpoint
    from meshrl.trainer.ranks.world import World
    from meshrl.trainer.trajectories.replay import replay, starting_point

    # As many as the services get: another number adds in another order.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    world = World.start("cpu")
    try:
        learner = build_learner(recipe, training_steps(recipe), world)
        start, first = starting_point(recipe.checkpoint_dir, step), 0
        if start is not None:
            state = checkpoint.load(
                start, learner.policy, learner.optimizers, beside=learner.beside
            )
            learner.kl_coef, first = state.kl_coef, state.step
        say(f"from {start or recipe.model.path}, step {first}", err=True)
        same = True
        for made in replay(
            learner,
            directory / FOLDER,
            directory / recipe.metrics_path.name,
            range(first, step + 1),
            tolerance=tolerance,
        ):
            same = made.first is None
            if as_json:
                say_json(json.dumps(asdict(made)))
                continue
            figures = ", ".join(f"{name} {value:.6g}" for name, value in made.figures.items())
            worst = max(made.largest.items(), key=lambda one: one[1])
            say(
                f"step {made.step}: {counted(made.rows, 'row')}, {figures}; largest relative difference"
                f" {worst[1]:.1e} ({worst[0]})"
            )
            if made.first is not None:
                say(f"step {made.step} differs: {made.first}")
    finally:
        world.close()
    if not same:
        sys.exit(Exit.FAILED)


def _refuse(recipe: Recipe) -> None:
    """Raises UserError: what the estimator started from cannot be told from what is logged."""
    algorithm = recipe.algorithm
    if recipe.reward.token_rewards and (
        algorithm.use_kl_in_reward or algorithm.overlong_buffer.enable
    ):
        raise UserError(
            "reward.token_rewards together with a penalty in the reward: rows are logged with the sum alone, and no"
            " step can be replayed"
        )
