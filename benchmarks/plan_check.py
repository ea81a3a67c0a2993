"""Does `meshrl plan` say what a mesh does? Six real meshes of paced engines, beside its predictions.

    python benchmarks/plan_check.py [--only on_policy,fully_async] [--steps 20]

Each mesh is a `meshrl up`: every service is a process and every call goes over gRPC. Engines take a GPU's time
without one (`tests.doubles.paced_engine`), and the trainer's step of a tiny model pauses for most of its time, so
that two cores have little to do. The planner is told what a user would measure: tokens a second, lengths, and the
trainer's own time in a step of the run. It predicts samples an hour and mean staleness, as the mean of SEEDS
simulations. Timed are the steps after the first FEW. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from plan_bench.paced_training import STEP_S

from meshrl.cli.demo.tiny_model import write_tiny_model
from meshrl.config.loading import load_recipe
from meshrl.planning.planner import PlanQuestion, plan

HERE = Path(__file__).resolve().parent
FEW = 5
SEEDS = 4
WITHIN = 0.15
SLOTS, GROUP, PROMPTS = 8, 4, 4
TOKENS_PER_S = 400.0
"""The rate of one engine: 50 a request."""
MEAN, P99, MOST = 150, 400, 480
PATIENCE_S = 900.0
REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    return float(len(solution_str) % 2)\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """One setting."""

    workers: int
    step_s: float
    max_staleness: float
    on_update: str


MESHES = {
    "on_policy": Mesh(workers=2, step_s=3.0, max_staleness=0, on_update="drain"),
    "one_step_off": Mesh(workers=2, step_s=6.0, max_staleness=1, on_update="drain"),
    "one_step_off_short_of_rollout": Mesh(
        workers=2, step_s=1.5, max_staleness=1, on_update="in_flight"
    ),
    "bounded_3": Mesh(workers=2, step_s=4.0, max_staleness=3, on_update="in_flight"),
    "bounded_3_short_of_rollout": Mesh(
        workers=1, step_s=2.0, max_staleness=3, on_update="in_flight"
    ),
    "fully_async": Mesh(workers=3, step_s=6.0, max_staleness=math.inf, on_update="in_flight"),
}


def write_recipe(directory: Path, mesh: Mesh, steps: int) -> Path:
    """A tiny model, some prompts, and engines that take their time."""
    write_tiny_model(directory / "model")
    (directory / "reward.py").write_text(REWARD)
    prompts = [json.dumps({"prompt": f"{n} plus {n} is", "answer": str(2 * n)}) for n in range(512)]
    (directory / "train.jsonl").write_text("\n".join(prompts) + "\n")
    recipe = {
        "run": {"name": "plan-check", "dir": str(directory / "run")},
        "model": {"path": str(directory / "model")},
        "data": {
            "train_files": [str(directory / "train.jsonl")],
            "max_prompt_length": 32,
            "max_response_length": MOST,
            "train_batch_size": PROMPTS,
        },
        "algorithm": {"adv_estimator": "plan_bench.paced_training"},
        "actor": {"optim": {"lr": 1e-6}},
        "rollout": {
            "name": "tests.doubles.paced_engine",
            "workers": mesh.workers,
            "n": GROUP,
            "slots": SLOTS,
            "on_update": mesh.on_update,
            "engine": {"tokens_per_s": TOKENS_PER_S, "length_mean": MEAN, "length_p99": P99},
        },
        "reward": {"custom_reward_function": {"path": str(directory / "reward.py")}},
        "queue": {"max_staleness": mesh.max_staleness},
        "trainer": {"total_training_steps": steps, "save_freq": -1, "test_freq": -1},
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def train(recipe: Path, mesh: Mesh) -> list[dict[str, float]]:
    """The metrics of the timed steps.

    Raises:
        RuntimeError: with the last words of a run that failed.
    """
    log = recipe.with_suffix(".log")
    searched = (str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH"))
    added = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, searched)),
        STEP_S: str(mesh.step_s),
    }
    command = [sys.executable, "-m", "meshrl.cli", "up", "--plain", str(recipe)]
    with log.open("wb") as said:
        running = subprocess.Popen(
            command, env={**os.environ, **added}, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            code = running.wait(PATIENCE_S)
        finally:
            running.terminate()  # of one that has not ended by itself
            running.wait()
    if code:
        raise RuntimeError(f"exit {code}\n{log.read_text()[-2000:]}")
    metrics = (recipe.parent / "run" / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, metrics) if "reward/mean" in line][FEW:]


def measured(steps: list[dict[str, float]]) -> dict[str, Any]:
    """The figures of the run."""

    def mean(key: str) -> float:
        return sum(step.get(key, 0.0) for step in steps) / len(steps)

    step_s = mean("time/step_s")
    return {
        "samples_per_h": 3600 * mean("batch/rows") / step_s,
        "staleness": mean("staleness/mean"),
        "staleness_by_step": [round(step["staleness/mean"], 2) for step in steps],
        "length_mean": mean("response/length_mean"),
        "step_s": step_s,
        "waiting_s": mean("time/waiting_s"),
        "publishing_s": mean("time/publishing_s"),
        # Everything that the trainer does itself, whatever its phases are called.
        "busy_s": step_s - mean("time/waiting_s") - mean("time/publishing_s"),
    }


def predicted(recipe: Path, mesh: Mesh, step_s: float) -> dict[str, float]:
    """The planner's figures for this division of workers and one trainer."""
    asked = PlanQuestion(
        gpus=mesh.workers + 1,
        rollout_gpus=mesh.workers,
        tokens_per_s=TOKENS_PER_S,
        step_s=step_s,
        step_gpus=1,
        length_mean=MEAN,
        length_p99=P99,
    )
    questions = [replace(asked, seed=seed) for seed in range(SEEDS)]
    outlooks = [plan(load_recipe(recipe), each).best.outlook for each in questions]
    return {
        "samples_per_h": sum(each.samples_per_h for each in outlooks) / SEEDS,
        "staleness": sum(each.staleness_mean for each in outlooks) / SEEDS,
    }


def off(said: float, seen: float) -> float:
    """The relative error of a prediction; of figures below one, the difference."""
    return abs(said - seen) / max(seen, 1.0)


def check(name: str, steps: int) -> dict[str, Any]:
    """One mesh, and what was said of it."""
    mesh = MESHES[name]
    with tempfile.TemporaryDirectory() as directory:
        recipe = write_recipe(Path(directory), mesh, steps)
        began = time.monotonic()
        seen = measured(train(recipe, mesh))
        took = time.monotonic() - began
        said = predicted(recipe, mesh, seen["busy_s"])
    misses = {key: off(said[key], seen[key]) for key in said}
    return {
        "mesh": name,
        "measured": seen,
        "predicted": said,
        "off": misses,
        "within": max(misses.values()) <= WITHIN,
        "took_s": took,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(MESHES), help="meshes, separated by commas")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    checked = []
    for name in options.only.split(","):
        one = check(name, options.steps)
        checked.append(one)
        seen, said = one["measured"], one["predicted"]
        print(
            f"{name:>30}: {seen['samples_per_h']:6,.0f} samples/h, predicted {said['samples_per_h']:6,.0f}"
            f" ({one['off']['samples_per_h']:.0%} off); staleness {seen['staleness']:.2f}, predicted"
            f" {said['staleness']:.2f}; {'within' if one['within'] else 'BEYOND'} {WITHIN:.0%}",
            flush=True,
        )
    print(json.dumps({"within": all(one["within"] for one in checked), "meshes": checked}))


if __name__ == "__main__":
    main()
