"""Seconds of RL to a held-out accuracy of 0.8 on the demo's task: under `meshrl up`, and under TRL's GRPOTrainer.

    make bench-time-to-accuracy    or    python benchmarks/time_to_accuracy.py [--target 0.8] [--rounds 1]

The same warm-started model, prompts, held-out prompts, reward function and hyper-parameters, read from
recipes/demo/recipe.yaml, and the same cores. Ours is the demo: every service a process of its own, one thread each,
fully asynchronous. TRL 1.16.0 samples, scores and trains in turn in one process; it runs with one thread and with as
many as there are cores, and the faster run counts.

The clock runs from where training begins (ours: the first wait for a batch) to the first greedy evaluation of
held-out prompts that reaches the target. TRL evaluates after every step, with the clock stopped. Ours evaluates every
second step, beside the training, and its clock goes on until the result is in: newer weights may have answered a part
of it, so no earlier moment is certain. Start-up, from the start of the command to where the clock begins, is told
apart. Ours and theirs in turn; the last line is one JSON object with medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# Without this folder, whose queue.py is not the standard library's.
sys.path[0] = str(HERE / "trainer_bench")

from meshrl.services.config import load_recipe  # noqa: E402
from meshrl.services.config.recipe import Recipe  # noqa: E402
from meshrl.services.demo.prepare import prepare  # noqa: E402

RECIPE = ROOT / "recipes" / "demo" / "recipe.yaml"
PEER = ROOT / ".venv-peer-trl" / "bin" / "python"
TEST_FREQ, PEER_TEST_FREQ = 2, 1
STEPS = 20
"""Of ours: four times what it needs."""
LIMIT_S = 1_200
"""The peer gives up after this long."""


def ours(target: float) -> dict[str, Any]:
    """The demo's `meshrl up`, in a directory of its own."""
    with tempfile.TemporaryDirectory() as directory:
        changes = [
            f"run.dir={directory}",
            f"trainer.test_freq={TEST_FREQ}",
            f"trainer.total_training_steps={STEPS}",
            "trainer.val_before_train=false",
        ]
        command = [Path(sys.executable).with_name("meshrl"), "up", "--plain", RECIPE, *changes]
        started = time.time()
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(
                f"meshrl up: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        lines = [
            json.loads(x) for x in (Path(directory) / "metrics.jsonl").read_text().splitlines()
        ]
    steps = [line for line in lines if "reward/mean" in line]
    began = steps[0]["time/unix_s"] - steps[0]["time/step_s"]
    curve = [
        {"seconds": line["time/unix_s"] - began, "accuracy": line["val/score/mean"]}
        for line in lines
        if "val/score/mean" in line
    ]
    for point in curve:
        print(f"  meshrl {point['seconds']:16.1f} s  accuracy {point['accuracy']:.3f}", flush=True)
    return _reached(curve, target) | {"start_up_s": round(began - started, 1)}


def theirs(recipe: Recipe, target: float, threads: int) -> dict[str, Any]:
    """GRPOTrainer.train until the target or the limit."""
    order = {
        "model": str(recipe.model.path),
        "train": str(recipe.data.train_files[0]),
        "held_out": str(recipe.data.val_files[0]),
        "reward": str(recipe.reward.custom_reward_function.path),
        "prompts": recipe.data.train_batch_size,
        "n": recipe.rollout.n,
        "max_response_length": recipe.data.max_response_length,
        "temperature": recipe.rollout.temperature,
        "clip_low": recipe.actor.clip_ratio_low,
        "clip_high": recipe.actor.clip_ratio_high,
        "kl_coef": recipe.actor.kl_loss_coef,
        "optim": recipe.actor.optim.model_dump(mode="json"),
        "seed": recipe.run.seed,
        "max_steps": 400,
        "micro_rows": 64,
        "test_freq": PEER_TEST_FREQ,
        "target": target,
        "limit_s": LIMIT_S,
        "threads": threads,
    }
    with tempfile.TemporaryDirectory() as directory:
        order["directory"] = directory
        started = time.time()
        done = subprocess.run(
            [PEER, HERE / "trainer_bench" / "peer_run.py", json.dumps(order)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
    if done.returncode:
        sys.exit(f"trl: exit {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    reached = _reached(found["curve"], target)
    return reached | {"threads": threads, "start_up_s": round(found["began"] - started, 1)}


def _reached(curve: list[dict[str, float]], target: float) -> dict[str, Any]:
    times = [point["seconds"] for point in curve if point["accuracy"] >= target]
    points = [[round(point["seconds"], 1), round(point["accuracy"], 3)] for point in curve]
    return {"seconds": round(times[0], 1) if times else None, "curve": points}


def _median(runs: list[dict[str, Any]], key: str) -> float | None:
    """None where a run never got there."""
    values = [run[key] for run in runs]
    return None if None in values else round(statistics.median(values), 1)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    if not PEER.exists():
        sys.exit(f"{PEER}: no such file; `make venv-peer-trl` installs TRL")
    os.chdir(ROOT)
    recipe = load_recipe(RECIPE, [], check=False)
    prepare(recipe.model.path.parent, seed=recipe.run.seed, report=lambda phase, progress: None)
    cores = len(os.sched_getaffinity(0))
    runs: dict[str, list[dict[str, Any]]] = {"meshrl": [], "trl": []}
    for _ in range(given.rounds):
        runs["meshrl"].append(ours(given.target))
        tries = [theirs(recipe, given.target, threads) for threads in sorted({1, cores})]
        runs["trl"].append(min(tries, key=lambda run: run["seconds"] or LIMIT_S))
    mine, peer = (_median(found, "seconds") for found in runs.values())
    result = {
        "benchmark": "time_to_accuracy",
        "target": given.target,
        "cores": cores,
        "meshrl_s": mine,
        "trl_s": peer,
        "speedup": round(peer / mine, 2) if mine and peer else None,
        "start_up_s": {name: _median(found, "start_up_s") for name, found in runs.items()},
        "runs": runs,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
