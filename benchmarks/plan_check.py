"""Does `meshrl plan` say what a mesh does? Real meshes of paced engines beside its predictions.

    python benchmarks/plan_check.py [--only on_policy,fully_async] [--steps 20] [--at-once 2]

Each mesh is a `meshrl up`: every service is a process and every call goes over gRPC. Engines take a GPU's time
without one (`tests.doubles.paced_engine`), and the trainer's step of a tiny model pauses for most of its time, so
that two cores have little to do. Reward functions, the judge behind HTTP and tools sleep. The planner gets what
a user would measure: tokens a second, lengths, seconds of a reward and of a call, and the trainer's own time in a
step of the run. It predicts samples an hour and mean staleness, as the mean of SEEDS simulations. Timed are the
steps after the first FEW. One line a mesh; the last line is one JSON object.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import yaml
from plan_bench.paced_training import STEP_S

from meshrl.cli.demo.tiny_model import write_tiny_model
from meshrl.config.loading import load_recipe
from meshrl.planning.planner import PlanQuestion, plan
from meshrl.planning.setting import Lengths

HERE = Path(__file__).resolve().parent
FEW = 5
SEEDS = 4
WITHIN = 0.15
GROUP, PROMPTS = 4, 4
TOKENS_PER_S = 400.0
"""The rate of one engine with all slots busy."""
MEAN, P99, MOST = 150, 400, 480
"""Tokens of a response."""
PATIENCE_S = 1800.0
SCORE = "    return float(len(solution_str) % 2)\n"
ARGUMENTS = "data_source, solution_str, ground_truth, extra_info=None"
LISTS = "data_sources, solution_strs, ground_truths, extra_infos"
REWARDS = {
    "plain": f"import time\ndef compute_score({ARGUMENTS}):\n    time.sleep(SECONDS)\n" + SCORE,
    "async": f"import asyncio\nasync def compute_score({ARGUMENTS}):\n    await asyncio.sleep(SECONDS)\n"
    + SCORE,
    "batched": f"import time\ndef compute_score({LISTS}):\n    time.sleep(SECONDS * len(solution_strs))\n"
    "    return [float(len(each) % 2) for each in solution_strs]\n",
}
TOOL = (
    "import asyncio\nasync def wait() -> str:\n    await asyncio.sleep(SECONDS)\n    return 'ok'\n"
)
ONE_IMPORT = Lock()
"""Held while a model is written: transformers cannot be imported by two threads at once."""
CHAT = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """One setting."""

    workers: int
    step_s: float
    max_staleness: float
    on_update: str = "in_flight"
    slots: int = 8
    reward: str = "plain"
    """A kind of REWARDS."""
    reward_s: float = 0.0
    reward_workers: int = 1
    concurrency: int = 32
    """Samples that an `async` reward awaits at once."""
    judge_s: float = 0.0
    """Seconds of a judge behind HTTP; 0: there is none."""
    judge_concurrency: int = 4
    tool_calls: int = 0
    tool_s: float = 0.0


SYNC = {"max_staleness": 0, "on_update": "drain"}
MESHES = {
    "on_policy": Mesh(workers=2, step_s=3.0, **SYNC),
    "one_step_off": Mesh(workers=2, step_s=6.0, max_staleness=1, on_update="drain"),
    "one_step_off_short_of_rollout": Mesh(workers=2, step_s=1.5, max_staleness=1),
    "bounded_3": Mesh(workers=2, step_s=4.0, max_staleness=3),
    "bounded_3_short_of_rollout": Mesh(workers=1, step_s=2.0, max_staleness=3),
    "fully_async": Mesh(workers=3, step_s=6.0, max_staleness=math.inf),
    "slow_reward": Mesh(workers=2, step_s=2.0, max_staleness=math.inf, reward_s=0.5),
    "slow_reward_3_workers": Mesh(
        workers=3, step_s=1.5, max_staleness=1, reward_s=1.0, reward_workers=3
    ),
    "slow_reward_on_policy": Mesh(workers=2, step_s=2.0, reward_s=0.5, **SYNC),
    "async_reward": Mesh(
        workers=2, step_s=2.0, max_staleness=3, reward="async", reward_s=2.0, concurrency=4
    ),
    "batched_reward": Mesh(
        workers=2,
        step_s=2.0,
        max_staleness=math.inf,
        reward="batched",
        reward_s=0.8,
        reward_workers=2,
    ),
    "http_judge": Mesh(workers=3, step_s=2.0, max_staleness=3, judge_s=1.5),
    "judge_and_reward": Mesh(
        workers=2,
        step_s=2.0,
        max_staleness=1,
        reward_s=0.4,
        judge_s=3.0,
        judge_concurrency=8,
    ),
    "tools": Mesh(workers=2, step_s=2.0, max_staleness=math.inf, slots=4, tool_calls=2, tool_s=3.0),
    "tools_one_step_off": Mesh(
        workers=2, step_s=3.0, max_staleness=1, slots=8, tool_calls=2, tool_s=2.0
    ),
    "tools_on_policy": Mesh(workers=2, step_s=2.0, tool_calls=2, tool_s=2.0, **SYNC),
    "tools_and_slow_reward": Mesh(
        workers=3,
        step_s=2.0,
        max_staleness=3,
        slots=8,
        tool_calls=1,
        tool_s=3.0,
        reward_s=0.8,
        reward_workers=1,
    ),
}


class SlowJudge(BaseHTTPRequestHandler):
    """Answers each sample after a while."""

    seconds = 0.0

    def do_POST(self) -> None:  # the server's name for it
        """Score one sample."""
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(self.seconds)
        with suppress(BrokenPipeError):  # the run has ended
            self.send_response(200)
            self.send_header("Content-Length", "3")
            self.end_headers()
            self.wfile.write(b"0.5")

    def log_message(self, *said: object) -> None:
        """Say nothing."""


@contextmanager
def judging(mesh: Mesh) -> Iterator[list[dict[str, Any]]]:
    """The judges of the recipe, while they are served."""
    if not mesh.judge_s:
        yield []
        return
    handler = type("Judge", (SlowJudge,), {"seconds": mesh.judge_s})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    options = {
        "url": f"http://127.0.0.1:{server.server_port}/",
        "concurrency": mesh.judge_concurrency,
    }
    try:
        yield [{"kind": "http", "options": options}]
    finally:
        server.shutdown()
        server.server_close()


def turn_lengths(mesh: Mesh) -> tuple[float, float]:
    """Mean and 99th percentile of one turn, the shorter the more of them there are."""
    turns = mesh.tool_calls + 1
    return MEAN / turns, P99 / turns


def response_lengths(mesh: Mesh) -> tuple[float, float]:
    """Mean and 99th percentile of what all turns of a response sample."""
    mean, p99 = turn_lengths(mesh)
    if not mesh.tool_calls:
        return mean, p99
    turn = Lengths(mean=mean, p99=p99, most=MOST)
    turns = range(mesh.tool_calls + 1)
    sums = sorted(sum(turn.draw(1, row, each) for each in turns) for row in range(10_000))
    return sum(sums) / len(sums), sums[int(0.99 * len(sums))]


def write_recipe(
    directory: Path, mesh: Mesh, steps: int, judges: Sequence[dict[str, Any]] = ()
) -> Path:
    """A tiny model, some prompts, and engines, rewards and tools that take their time."""
    write_tiny_model(directory / "model")
    (directory / "model/chat_template.jinja").write_text(CHAT)
    source = REWARDS[mesh.reward].replace("SECONDS", str(mesh.reward_s))
    (directory / "reward.py").write_text(source)
    (directory / "tool.py").write_text(TOOL.replace("SECONDS", str(mesh.tool_s)))
    asked = [f"{number} plus {number} is" for number in range(512)]
    prompts = [
        json.dumps({"prompt": [{"role": "user", "content": text}], "answer": "1"}) for text in asked
    ]
    (directory / "train.jsonl").write_text("\n".join(prompts) + "\n")
    mean, p99 = turn_lengths(mesh)
    recipe: dict[str, Any] = {
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
            "slots": mesh.slots,
            "on_update": mesh.on_update,
            "engine": {"tokens_per_s": TOKENS_PER_S, "length_mean": mean, "length_p99": p99},
        },
        "reward": {
            "custom_reward_function": {"path": str(directory / "reward.py")},
            "workers": mesh.reward_workers,
            "concurrency": mesh.concurrency,
            "judges": list(judges),
        },
        "queue": {"max_staleness": mesh.max_staleness},
        "trainer": {"total_training_steps": steps, "save_freq": -1, "test_freq": -1},
    }
    if mesh.tool_calls:
        recipe["rollout"] |= {
            "program": "tools",
            "program_options": {
                "tools": [f"{directory / 'tool.py'}:wait"],
                "format": "plan_bench.always_calls",
                "max_turns": mesh.tool_calls + 1,
            },
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
    mean, p99 = response_lengths(mesh)
    asked = PlanQuestion(
        gpus=mesh.workers + 1,
        rollout_gpus=mesh.workers,
        tokens_per_s=TOKENS_PER_S,
        step_s=step_s,
        step_gpus=1,
        length_mean=mean,
        length_p99=p99,
        reward_s=mesh.reward_s,
        judge_s=mesh.judge_s,
        tool_calls=mesh.tool_calls,
        tool_s=mesh.tool_s,
    )
    questions = [replace(asked, seed=seed) for seed in range(SEEDS)]
    outlooks = [plan(load_recipe(recipe, check=False), each).best.outlook for each in questions]
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
    with tempfile.TemporaryDirectory() as directory, judging(mesh) as judges:
        with ONE_IMPORT:
            recipe = write_recipe(Path(directory), mesh, steps, judges)
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
    parser.add_argument("--at-once", type=int, default=1, help="meshes that run beside each other")
    options = parser.parse_args()
    checked = []
    with ThreadPoolExecutor(options.at_once) as threads:
        running = [threads.submit(check, name, options.steps) for name in options.only.split(",")]
        for each in as_completed(running):
            one = each.result()
            checked.append(one)
            seen, said = one["measured"], one["predicted"]
            print(
                f"{one['mesh']:>30}: {seen['samples_per_h']:6,.0f} samples/h, predicted"
                f" {said['samples_per_h']:6,.0f} ({one['off']['samples_per_h']:.0%} off); staleness"
                f" {seen['staleness']:.2f}, predicted {said['staleness']:.2f};"
                f" {'within' if one['within'] else 'BEYOND'} {WITHIN:.0%}",
                flush=True,
            )
    print(json.dumps({"within": all(one["within"] for one in checked), "meshes": checked}))


if __name__ == "__main__":
    main()
