"""Published speed-ups of asynchronous over synchronous training, and the prediction of `meshrl plan` for each.

    python benchmarks/plan_published.py [--only areal_1_5b,pipelinerl]

A speed-up is the best split of the GPUs, asynchronous, over the same GPUs that all sample, then all train, without
any cost of switching: to the planner that is a rollout fleet and a trainer of all GPUs each, at `max_staleness` 0.
What the publications give is in PUBLISHED. None gives the distribution of its lengths, nor tokens a second, so each
is planned with a mean of a sixth, a third and half of the longest response, 1 in 100 as long as that, and with the
planner's assumptions for speed (an H100): a range, no point. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

from meshrl.config.loading import load_recipe
from meshrl.config.recipe import Recipe
from meshrl.planning.planner import PlanQuestion, plan

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes/gsm8k/recipe.yaml"
MEANS = (1 / 6, 1 / 3, 1 / 2)
"""Mean lengths as a share of the longest response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The run behind a published figure."""

    ratio: float
    gpus: int
    params: float
    prompts: int
    """Prompts of a batch, each answered `group` times."""
    group: int
    longest: int
    max_staleness: float


PUBLISHED = {
    "areal_1_5b": Published(
        ratio=41.0 / 14.8,
        gpus=128,
        params=1.5e9,
        prompts=128,
        group=16,
        longest=27_648,
        max_staleness=4,
    ),
    "areal_7b": Published(
        ratio=57.7 / 25.4,
        gpus=192,
        params=7.6e9,
        prompts=128,
        group=16,
        longest=27_648,
        max_staleness=4,
    ),
    "pipelinerl": Published(
        ratio=2.0,
        gpus=128,
        params=7.6e9,
        prompts=256,
        group=16,
        longest=8192,
        max_staleness=math.inf,
    ),
}


def recipe_of(run: Published, directory: Path, max_staleness: float) -> Recipe:
    """Half of the rows of a batch find a slot on half of the GPUs."""
    recipe = yaml.safe_load(RECIPE.read_text())
    recipe["data"] |= {
        "train_batch_size": run.prompts,
        "max_response_length": run.longest,
        "max_prompt_length": 1024,
    }
    recipe["rollout"] |= {"n": run.group, "slots": math.ceil(run.prompts * run.group / run.gpus)}
    recipe["queue"]["max_staleness"] = max_staleness
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return load_recipe(path, check=False)


def predicted(run: Published, mean: float, directory: Path) -> float:
    """The speed-up where the mean response has so large a share of the longest."""

    def samples(max_staleness: float, gpus: int, rollout_gpus: int | None) -> float:
        asked = PlanQuestion(
            gpus=gpus,
            rollout_gpus=rollout_gpus,
            params=run.params,
            length_mean=mean * run.longest,
            length_p99=run.longest,
        )
        found = plan(recipe_of(run, directory, max_staleness), asked)
        return found.best.outlook.samples_per_h

    together = samples(0, 2 * run.gpus, run.gpus)
    return samples(run.max_staleness, run.gpus, None) / together


def main() -> None:
    """Plan and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default=",".join(PUBLISHED), help="runs, separated by commas")
    options = parser.parse_args()
    said = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in options.only.split(","):
            run = PUBLISHED[name]
            said[name] = [predicted(run, mean, Path(directory)) for mean in MEANS]
            ratios = ", ".join(f"{ratio:.2f}" for ratio in said[name])
            print(f"{name:>12}: published {run.ratio:.2f}, predicted {ratios}", flush=True)
    print(json.dumps({"means": MEANS, "predicted": said}))


if __name__ == "__main__":
    main()
