"""Seconds of RL to a held-out accuracy of 0.8 on the demo's task: under `meshrl up`, and under TRL's GRPOTrainer.

    make bench-time-to-accuracy    or    python benchmarks/time_to_accuracy.py [--target 0.8] [--rounds 1] [--lr 1e-4]

The same warm-started model, prompts, held-out prompts, reward function and hyper-parameters, read from
recipes/demo/recipe.yaml, and the same cores. The learning rate is a fifth of the demo's: with that one, four steps
decide, and the measurement is one of how a run begins. Ours is `meshrl up`, every service a process of its own, one
thread each, fully asynchronous, one rollout worker. TRL 1.16.0 samples, scores and trains in turn in one process; it
runs with one thread and with as many as there are cores, and the faster run counts.

Both sides are judged alike: the weights after each step, decoded greedily by transformers on held-out prompts. TRL is
judged between steps, with the clock stopped. Ours saves a checkpoint after each step, with the clock running, and is
judged by them after the run. One clock runs from the start of the command, another from where all processes are up
(ours: every service serves, and the first version with them), until the step is made whose weights reach the target;
start-up is what lies between the two. Processor time of all processes goes with each: on a machine that others use,
it is what can be compared, and the result says whether others used this one. Ours goes on behind the target, and each
of its steps is taken to cost the same. Ours and theirs in turn; the last line is one JSON object with medians of the
rounds.
"""

from __future__ import annotations

import argparse
import itertools
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

sys.path.append(str(HERE))
from accuracy import accuracy, score_of  # noqa: E402
from neighbours import Neighbours, own_s  # noqa: E402

from meshrl.cli.demo.prepare import prepare  # noqa: E402
from meshrl.config import load_recipe  # noqa: E402
from meshrl.config.recipe import Recipe  # noqa: E402

RECIPE = ROOT / "recipes" / "demo" / "recipe.yaml"
PEER = ROOT / ".venv-peer-trl" / "bin" / "python"
LIMIT_S = 1_200
"""The peer gives up after this long."""
UP = ("version 1.0 is committed", "feeder │")
"""Log lines that end a start: the engines serve the first weights, the feeder serves prompts."""


def ours(recipe: Recipe, arguments: argparse.Namespace) -> dict[str, Any]:
    """`meshrl up` in a directory of its own, then a look at its checkpoints."""
    with tempfile.TemporaryDirectory() as directory:
        changes = [
            f"run.dir={directory}",
            f"actor.optim.lr={arguments.lr}",
            f"trainer.total_training_steps={arguments.steps}",
            "trainer.save_freq=1",
            "trainer.keep_ckpt_every=1",
            "data.val_files=[]",
            "rollout.workers=1",
            "rollout.slots=256",
        ]
        command = [Path(sys.executable).with_name("meshrl"), "up", "--plain", RECIPE, *changes]
        started = time.time()
        began, start_up_cpu_s, cpu_s = _run(command, {"OMP_NUM_THREADS": "1"})
        lines = [
            json.loads(x) for x in (Path(directory) / "metrics.jsonl").read_text().splitlines()
        ]
        step_times = {x["step"]: x["time/unix_s"] - began for x in lines if "reward/mean" in x}
        curve = _judged(Path(directory), recipe, step_times, arguments.target)
    steps = [step_times[step] - step_times[step - 1] for step in sorted(step_times)[1:]]
    return _figures(
        curve,
        arguments.target,
        start_up=(began - started, start_up_cpu_s),
        step=(statistics.median(steps), cpu_s / arguments.steps),
    )


def _run(command: list[Any], environment: dict[str, str]) -> tuple[float, float, float]:
    """Run a command to its end.

    Returns when it was up, and the processor time of all of its processes until then and from then on.
    """
    up: dict[str, float] = {}
    before, spent = own_s(), 0.0
    lines: list[str] = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            lines.append(line)
            for sign in UP:
                if sign in line:
                    up.setdefault(sign, time.time())
                    if len(up) == len(UP) and not spent:
                        spent = _cpu_s(running.pid)
    if running.returncode or len(up) < len(UP):
        sys.exit(f"meshrl up: exit {running.returncode}, {up}\n{''.join(lines)[-2000:]}")
    return max(up.values()), spent, own_s() - before - spent


def _cpu_s(pid: int) -> float:
    """Processor time of a live process and its descendants until now, those that have ended among them."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(_cpu_s(int(child)) for child in children)


def _judged(
    directory: Path, recipe: Recipe, step_times: dict[int, float], target: float
) -> list[dict[str, float]]:
    """The accuracy of one checkpoint after the other, until one reaches the target."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from meshrl.trainer.checkpoint.export import export_checkpoint

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.path)
    score = score_of(str(recipe.reward.custom_reward_function.path))
    held_out, longest = str(recipe.data.val_files[0]), recipe.data.max_response_length
    curve = []
    for path in sorted((directory / "checkpoints").glob("step-*")):
        step = int(path.name.split("-")[1])
        export = export_checkpoint(path, directory / "judged", model=recipe.model.path)
        model = AutoModelForCausalLM.from_pretrained(export)
        found = accuracy(model, tokenizer, held_out, score, longest)
        curve.append({"step": step, "seconds": step_times[step], "accuracy": found})
        print(
            f"  meshrl  step {step:3} {step_times[step]:7.1f} s  accuracy {found:.3f}", flush=True
        )
        if found >= target:
            break
    return curve


def theirs(recipe: Recipe, arguments: argparse.Namespace, threads: int) -> dict[str, Any]:
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
        "optim": recipe.actor.optim.model_dump(mode="json") | {"lr": arguments.lr},
        "seed": recipe.run.seed,
        "max_steps": 400,
        "micro_rows": arguments.peer_micro_rows,
        "target": arguments.target,
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
    curve = found["curve"]
    steps = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(curve)]
    figures = _figures(
        curve,
        arguments.target,
        start_up=(found["began"] - started, found["start_up_cpu_s"]),
        step=(statistics.median(steps), found["cpu_s"] / len(steps)),
    )
    return {"threads": threads} | figures


def _figures(
    curve: list[dict[str, float]],
    target: float,
    *,
    start_up: tuple[float, float],
    step: tuple[float, float],
) -> dict[str, Any]:
    """The figures of one run; `start_up` and `step` are wall and processor seconds."""
    reached = next((point for point in curve if point["accuracy"] >= target), None)
    points = [
        [point["step"], round(point["seconds"], 1), round(point["accuracy"], 3)] for point in curve
    ]
    found: dict[str, Any] = {"seconds": None, "command_s": None, "command_cpu_s": None}
    if reached is not None:
        found = {
            "seconds": round(reached["seconds"], 1),
            "command_s": round(start_up[0] + reached["seconds"], 1),
            "command_cpu_s": round(start_up[1] + reached["step"] * step[1], 1),
        }
    return found | {
        "start_up_s": round(start_up[0], 1),
        "start_up_cpu_s": round(start_up[1], 1),
        "step_s": round(step[0], 2),
        "cpu_s_per_step": round(step[1], 2),
        "curve": points,
    }


FIGURES = (
    "seconds",
    "command_s",
    "command_cpu_s",
    "start_up_s",
    "start_up_cpu_s",
    "step_s",
    "cpu_s_per_step",
)


def _medians(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float | None]]:
    """Figure to side to its median, None where a run never got there; `ratio` is the peer's to ours."""
    found: dict[str, dict[str, float | None]] = {}
    for key in FIGURES:
        sides: dict[str, float | None] = {}
        for name, done in runs.items():
            values = [run[key] for run in done]
            sides[name] = None if None in values else round(statistics.median(values), 2)
        mine, peer = sides["meshrl"], sides["trl"]
        found[key] = sides | {"ratio": round(peer / mine, 2) if mine and peer else None}
    return found


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=14, help="of ours: more than it needs")
    parser.add_argument("--peer-micro-rows", type=int, default=64)
    arguments = parser.parse_args()
    if not PEER.exists():
        sys.exit(f"{PEER}: no such file; `make venv-peer-trl` installs TRL")
    os.chdir(ROOT)
    os.environ.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # else each start compiles what has no byte code yet
    recipe = load_recipe(RECIPE, [], check=False)
    prepare(recipe.model.path.parent, seed=recipe.run.seed, report=lambda phase, progress: None)
    cores = len(os.sched_getaffinity(0))
    neighbours = Neighbours()
    runs: dict[str, list[dict[str, Any]]] = {"meshrl": [], "trl": []}
    for _ in range(arguments.rounds):
        runs["meshrl"].append(ours(recipe, arguments))
        tries = [theirs(recipe, arguments, threads) for threads in sorted({1, cores})]
        runs["trl"].append(min(tries, key=lambda run: run["seconds"] or LIMIT_S))
    medians = _medians(runs)
    for key, sides in medians.items():
        print(f"  {key:15} {'   '.join(f'{name} {value}' for name, value in sides.items())}")
    result = {
        "benchmark": "time_to_accuracy",
        "target": arguments.target,
        "cores": cores,
        **medians,
        **neighbours.seen(),
        "lr": arguments.lr,
        "runs": runs,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
