"""The modes under `meshrl up`, with a policy that learns: samples an hour, and the accuracy that they bought.

Every service is a process of its own, the engine is the embedded one, the trainer trains. The task is hops/: a tiny
policy asks a tool where a key leads, follows the chain to its end and says what it found there. Chains are geometric,
1 to 8 calls; a call takes 50 to 500 ms, drawn from the row's name. As it comes, the policy mostly gives up after the
first call.

All modes have the same model, prompts, worker, batch and number of trained samples, and as many slots as a batch has
rows, so that on-policy sampling can use them all; two settings differ. Timed are the steps after the first ones, in
which the policy learns to go on and rows grow long; start-up and the evaluations, before the first step and after
the last, are outside. Accuracy is that of greedy answers to held-out keys under the last weights.

What is measured holds while processors wait for tools, as they do where sampling is done elsewhere: `busy` tells how
many of them all processes kept busy in the steps that are timed.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_bench.hops.prepare import prepare

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "benchmarks" / "fleet_bench" / "hops" / "recipe.yaml"
ASSETS = ROOT / "runs" / "hops"
WARM_UP_STEPS = 15
LAST_STEPS = 20
"""The training reward is a mean of so many: what the policy earns at temperature 1, where the accuracy is full."""
LIMIT_S = 600.0
Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to train."""

    name: str
    max_staleness: str
    on_update: str


MODES = (
    Mode(name="synchronous", max_staleness="0", on_update="drain"),
    Mode(name="+ overlap (one step off)", max_staleness="1", on_update="drain"),
    Mode(name="+ streaming (bounded by 4)", max_staleness="4", on_update="drain"),
    Mode(name="+ partial rollout (bounded by 4)", max_staleness="4", on_update="in_flight"),
    Mode(name="fully asynchronous", max_staleness=".inf", on_update="in_flight"),
)


def up(mode: Mode, run_dir: Path, *changes: str) -> float:
    """One run to its end; returns how many processors it kept busy in the steps that are timed.

    Raises:
        RuntimeError: with the last words of a run that failed.
    """
    command = [
        sys.executable,
        "-m",
        "meshrl.cli",
        "up",
        "--plain",
        str(RECIPE),
        f"run.dir={run_dir}",
        f"queue.max_staleness={mode.max_staleness}",
        f"rollout.on_update={mode.on_update}",
        *changes,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = run_dir.with_suffix(".log")
    with log.open("wb") as said:
        running = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said)
        try:
            marks = watched(running, run_dir / "metrics.jsonl")
        finally:
            running.terminate()  # of one that has not ended by itself
            running.wait()
    if running.returncode:
        raise RuntimeError(f"{mode.name}: exit {running.returncode}\n{log.read_text()[-2000:]}")
    (began, before), (ended, after) = marks[0], marks[-1]
    return (after - before) / (ended - began)


def watched(running: subprocess.Popen[bytes], metrics: Path) -> list[tuple[float, float]]:
    """Time, and processor time of all processes, after each timed step, until the run ends or LIMIT_S are over."""
    marks: list[tuple[float, float]] = []
    seen, latest = WARM_UP_STEPS - 1, time.monotonic() + LIMIT_S
    while running.poll() is None and time.monotonic() < latest:
        steps = metrics.read_text().count("reward/mean") if metrics.exists() else 0
        if steps > seen:
            seen = steps
            marks.append((time.monotonic(), cpu_s(running.pid)))
        time.sleep(0.1)
    return marks


def cpu_s(pid: int) -> float:
    """Processor time of a live process and its descendants."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_s(int(child)) for child in children)


def report_of(lines: Sequence[Line]) -> dict[str, Any]:
    """The figures of metrics.jsonl after the first steps, and of the evaluation at the end."""
    steps = [line for line in lines if "reward/mean" in line]
    timed = steps[WARM_UP_STEPS:]
    seconds = sum(line["time/step_s"] for line in timed)
    rows = sum(line["batch/rows"] for line in timed)
    first, last = (line for line in lines if "val/score/mean" in line)

    def mean(key: str) -> float:
        return sum(line[key] for line in timed) / len(timed)

    return {
        "samples_per_hour": 3600 * rows / seconds,
        "step_s": seconds / len(timed),
        "longest_step_s": max(line["time/step_s"] for line in timed),
        "trainer_waits": sum(line["time/waiting_s"] for line in timed) / seconds,
        "training_s": mean("time/training_s"),
        "publishing_s": mean("time/publishing_s"),
        "turns": mean("reward_component/turns"),
        "mean_staleness": mean("staleness/mean"),
        "max_staleness": max(line["staleness/max"] for line in timed),
        "accuracy_before": first["val/score/mean"],
        "accuracy": last["val/score/mean"],
        "reward": sum(line["reward/mean"] for line in steps[-LAST_STEPS:]) / LAST_STEPS,
        "tasks": last["val/tasks"],
        "trained": sum(line["batch/rows"] for line in steps),
        "reward_by_step": [round(line["reward/mean"], 3) for line in steps],
    }


def train(mode: Mode, *changes: str) -> dict[str, Any]:
    """One mode, from `meshrl up` to its last evaluation."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir, began = Path(directory) / "run", time.monotonic()
        busy = up(mode, run_dir, *changes)
        whole_s = time.monotonic() - began
        lines = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    report = report_of(lines)
    in_steps = sum(line["time/step_s"] for line in lines if "reward/mean" in line)
    return {"mode": mode.name, **report, "busy": busy, "start_and_end_s": whole_s - in_steps}


async def measure(changes: Sequence[str] = ()) -> dict[str, Any]:
    """All modes, one after the other, and what each adds."""
    await asyncio.to_thread(prepare, ASSETS)
    modes = []
    for mode in MODES:
        modes.append(await asyncio.to_thread(train, mode, *changes))
        show(modes[-1])
    synchronous, overlap, streaming, partial, full = (one["samples_per_hour"] for one in modes)
    return {
        "modes": modes,
        "overlap_gains": overlap / synchronous,
        "streaming_gains": streaming / overlap,
        "partial_rollout_gains": partial / streaming,
        "full_over_synchronous": full / synchronous,
        "accuracy_difference": modes[-1]["accuracy"] - modes[0]["accuracy"],
    }


def show(one: dict[str, Any]) -> None:
    """For people."""
    print(
        f"{one['mode']:>32}: {one['samples_per_hour']:8,.0f} samples/h, accuracy {one['accuracy']:.3f} "
        f"(reward {one['reward']:.2f}), "
        f"trainer waits {one['trainer_waits']:.0%} of {one['step_s']:.2f} s a step, staleness "
        f"{one['mean_staleness']:.1f} (max {one['max_staleness']:.0f}), {one['busy']:.1f} processors busy",
        flush=True,
    )
