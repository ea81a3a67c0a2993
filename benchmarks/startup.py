"""Seconds from the command to the first trained step of a run of the demo's size, beside TRL's GRPOTrainer.

    make bench-startup    or    python benchmarks/startup.py [--repeats 5]

The same model (random weights), prompts, reward function, batch and cores for both. Ours is `meshrl up` on
recipes/demo/recipe.yaml with one rollout worker: queue, reward, reference, trainer, rollout and feeder, each a
process of its own with one thread. TRL 1.16.0 does all in one process, with as many threads as there are cores. The
clock runs from the start of the command until the first optimizer step is done; ours reads the time of the step from
metrics.jsonl. Processor seconds are those of the whole command: ours ends with a checkpoint and six processes, theirs
at once, its held-out prompts left out. Ours and theirs in turn; the last line is one JSON object with the medians.
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

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# Without this folder, whose queue.py is not the standard library's.
sys.path[0] = str(HERE / "trainer_bench")
sys.path.append(str(HERE))

from neighbours import Neighbours, own_s  # noqa: E402

from meshrl.cli.demo.prepare import programs  # noqa: E402
from meshrl.cli.demo.tiny_model import write_tiny_model  # noqa: E402
from meshrl.config import Recipe, load_recipe  # noqa: E402

RECIPE = ROOT / "recipes" / "demo" / "recipe.yaml"
PEER = ROOT / ".venv-peer-trl" / "bin" / "python"
LIMIT_S = 600
PROMPTS, HELD_OUT = 512, 4
"""TRL's driver asks for held-out prompts; it answers them with the clock stopped."""


def assets(directory: Path) -> list[str]:
    """The model and the prompts, and the overrides that name them."""
    write_tiny_model(directory / "model")
    for name, held_out, count in (("train", False, PROMPTS), ("held_out", True, HELD_OUT)):
        rows = itertools.islice(programs(0, held_out=held_out), count)
        lines = (json.dumps({"prompt": row.prompt, "answer": row.answer}) for row in rows)
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return [
        f"model.path={directory / 'model'}",
        f"data.train_files=[{directory / 'train.jsonl'}]",
        "data.val_files=[]",
        "rollout.workers=1",
        "trainer.total_training_steps=1",
    ]


def ours(changes: list[str]) -> tuple[float, float]:
    """Seconds to the first step of `meshrl up`, and processor seconds of the command."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "meshrl.cli", "up", "--plain", RECIPE, *changes]
        started, before = time.time(), own_s()
        done = subprocess.run(
            [*command, f"run.dir={directory}"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        if done.returncode:
            sys.exit(f"meshrl up: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr}")
        lines = map(json.loads, (Path(directory) / "metrics.jsonl").read_text().splitlines())
        first = next(line for line in lines if "reward/mean" in line)
    return float(first["time/unix_s"]) - started, own_s() - before


def theirs(recipe: Recipe, directory: Path, threads: int) -> tuple[float, float]:
    """Seconds to the first step of GRPOTrainer, and processor seconds of the command."""
    order = {
        "model": str(directory / "model"),
        "train": str(directory / "train.jsonl"),
        "held_out": str(directory / "held_out.jsonl"),
        "reward": str(ROOT / str(recipe.reward.custom_reward_function.path)),
        "prompts": recipe.data.train_batch_size,
        "n": recipe.rollout.n,
        "max_response_length": recipe.data.max_response_length,
        "temperature": recipe.rollout.temperature,
        "clip_low": recipe.actor.clip_ratio_low,
        "clip_high": recipe.actor.clip_ratio_high,
        "kl_coef": recipe.actor.kl_loss_coef,
        "optim": recipe.actor.optim.model_dump(mode="json"),
        "seed": recipe.run.seed,
        "max_steps": 1,
        "micro_rows": 64,
        "target": 2.0,
        "limit_s": LIMIT_S,
        "threads": threads,
    }
    with tempfile.TemporaryDirectory() as output:
        started = time.time()
        done = subprocess.run(
            [
                PEER,
                HERE / "trainer_bench" / "peer_run.py",
                json.dumps({**order, "directory": output}),
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    if done.returncode:
        sys.exit(f"trl: exit {done.returncode}\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    (seconds,) = (point["seconds"] for point in found["curve"] if point["step"] == 1)
    return found["began"] - started + seconds, found["start_up_cpu_s"] + found["cpu_s"]


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if not PEER.exists():
        sys.exit(f"{PEER}: no such file; `make venv-peer-trl` installs TRL")
    os.chdir(ROOT)
    os.environ.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # else each start compiles what has no byte code yet
    recipe = load_recipe(RECIPE, [], check=False)
    cores = len(os.sched_getaffinity(0))
    neighbours = Neighbours()
    runs: dict[str, list[tuple[float, float]]] = {"meshrl": [], "trl": []}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        changes = assets(directory)
        for _ in range(arguments.repeats):
            for name, found in (
                ("meshrl", ours(changes)),
                ("trl", theirs(recipe, directory, cores)),
            ):
                runs[name].append(found)
                print(f"  {name:6} {found[0]:6.2f} s, {found[1]:6.2f} processor s", flush=True)
    medians = {
        name: tuple(round(statistics.median(column), 2) for column in zip(*found, strict=True))
        for name, found in runs.items()
    }
    (mine, mine_cpu), (peer, peer_cpu) = medians.values()
    result = {
        "benchmark": "startup",
        "cores": cores,
        "meshrl_s": mine,
        "trl_s": peer,
        "ratio": round(mine / peer, 2),
        "meshrl_cpu_s": mine_cpu,
        "trl_cpu_s": peer_cpu,
        "cpu_ratio": round(mine_cpu / peer_cpu, 2),
        **neighbours.seen(),
        "runs": {
            name: [[round(x, 2) for x in pair] for pair in found] for name, found in runs.items()
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
