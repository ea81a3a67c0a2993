"""`meshrl plan`: how many GPUs should sample, how many should train, and what to expect of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from meshrl.cli.options import Finite, json_option, recipe_argument
from meshrl.common.plain_text import counted, say, say_json
from meshrl.config.loading import load_recipe

POSITIVE = Finite(min=0, min_open=True)
COUNT = click.IntRange(min=1)


@click.command()
@recipe_argument
@click.option("--gpus", type=COUNT, required=True, help="GPUs of rollout and trainer together.")
@click.option("--rollout-gpus", type=COUNT, help="Look at this split only.")
@click.option("--gpus-per-worker", type=COUNT, default=1, help="GPUs of one engine.")
@click.option("--tokens-per-s", type=POSITIVE, help="Sampled by a GPU whose slots are all busy.")
@click.option(
    "--alone-speedup",
    type=Finite(min=1),
    default=1.0,
    help="How many times as fast a request runs alone as among rollout.slots.",
)
@click.option("--step-s", type=POSITIVE, help="A step's seconds on --step-gpus GPUs.")
@click.option("--step-gpus", type=COUNT, default=8, show_default=True)
@click.option("--train-tokens-per-s", type=POSITIVE, help="Trained by one GPU.")
@click.option("--prompt-mean", type=POSITIVE, help="Tokens of a prompt.")
@click.option("--length-mean", type=POSITIVE, help="Tokens of a response.")
@click.option("--length-p99", type=POSITIVE, help="Tokens that 1 response in 100 exceeds.")
@click.option(
    "--alike",
    type=Finite(0, 1),
    default=0.0,
    help="Share of the lengths' variance that belongs to the prompt.",
)
@click.option("--params", type=POSITIVE, help="Parameters of the model, e.g. 8e9.")
@click.option("--bandwidth", type=POSITIVE, default=10.0, help="GB/s into each rollout GPU.")
@click.option("--commit-s", type=Finite(min=0), default=0.0, help="Pause of an update.")
@click.option("--reward-s", type=Finite(min=0), default=0.0, help="Functions, a sample.")
@click.option("--judge-s", type=Finite(min=0), default=0.0, help="Each judge, a sample.")
@click.option("--tool-calls", type=click.IntRange(min=0), default=0, help="Calls of one response.")
@click.option("--tool-s", type=Finite(min=0), default=0.0, help="Time of one tool call.")
@click.option("--seed", type=int, default=0)
@json_option
def plan(
    recipe: Path, overrides: tuple[str, ...], as_json: bool, bandwidth: float, **asked: Any
) -> None:
    """Simulate RECIPE on --gpus GPUs in virtual time: the best split, samples per hour, staleness, idle shares.

    What is not given is assumed, and every assumption is printed.
    """
    from meshrl.planning.planner import FleetPlan, PlanQuestion
    from meshrl.planning.planner import plan as make

    if asked["step_s"] and asked["train_tokens_per_s"]:
        raise click.UsageError("--step-s and --train-tokens-per-s say the same: give one of them")
    loaded = load_recipe(recipe, overrides, check=False)

    def tell(rollout_gpus: int) -> None:
        rest = asked["gpus"] - rollout_gpus
        say(
            f"simulating {counted(rollout_gpus, 'GPU')} of rollout and {rest} of the trainer",
            err=True,
        )

    answer: FleetPlan = make(loaded, PlanQuestion(bandwidth=bandwidth * 1e9, **asked), tell)
    if as_json:
        say_json(json.dumps(asdict(answer) | {"bottleneck": answer.best.bottleneck}))
        return
    head = ("rollout", "trainer", "samples/h", "step s", "staleness", "p99", "rollout idle")
    say(
        f"  {head[0]:>7} {head[1]:>7} {head[2]:>10} {head[3]:>8} {head[4]:>9} {head[5]:>4}"
        f" {head[6]:>12} trainer idle reward queue  first bottleneck"
    )
    for split in answer.tried:
        seen = split.outlook
        say(
            f"{'>' if split is answer.best else ' '} {split.rollout_gpus:7} {split.trainer_gpus:7}"
            f" {seen.samples_per_h:10,.0f} {split.step_s:8.3g} {seen.staleness_mean:9.2f}"
            f" {seen.staleness_p99:4} {seen.rollout_idle:12.0%} {seen.trainer_idle:12.0%}"
            f" {seen.reward_load:6.0%} {seen.queue_load:5.0%}  {split.bottleneck}"
        )
    say(f"{answer.best.bottleneck}: {answer.advice}")
    for assumption in answer.assumptions:
        say(f"- {assumption}")
