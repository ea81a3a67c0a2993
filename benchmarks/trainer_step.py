"""One GRPO optimizer step on CPU, ours and TRL's: tokens per second, and peak memory above the weights.

    make bench-trainer    or    python benchmarks/trainer_step.py [--threads 1] [--steps 3] [--work wide,demo]

With `--against FOLDER`, a checkout of another commit takes TRL's place: both builds in turn, ROUNDS times each.

Identical batches, ragged: responses are a quarter of the longest one in the mean (exponential, cut). Two models with
random weights: `wide`, 2 layers and a vocabulary of 100,000, and `demo`, the demo's shape. Both sides are given the
same old log-probs and rewards and compute the same loss (clipped ratio, token mean, AdamW): loss, gradient norm and
entropy of every step are compared, and a difference above 1e-3 ends the benchmark.

Ours is `Learner.learn`, from fetched rows to metrics. TRL 1.16.0, in an environment of its own, is its trainer's
`compute_loss`, backward pass and optimizer step on tensors that are padded already. Both run in float32, TRL with
every combination of micro-batches of 8 rows (its default) or the whole batch, with activation checkpointing (its
default) or without. It is compared by its fastest run in speed and by its leanest run in memory.

Every measurement is a process of its own. Tokens are real ones, prompt and response; speed is the median step without
the first, by the clock and by processor time, which others on the machine disturb less. Memory is the high-water mark
of resident memory over all steps, above what is resident before the first: gradients and AdamW's state are in it,
weights and libraries are not. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[0] = str(HERE / "trainer_bench")
sys.path.append(str(HERE))

from neighbours import Neighbours  # noqa: E402
from work import DEMO, GROUP, WIDE, Work  # noqa: E402

PEER = ROOT / ".venv-peer-trl" / "bin" / "python"
ROUNDS = 3
TOLERANCE = 1e-3
MIB = 1 << 20


def write_model(work: Work, path: Path) -> None:
    """Random weights, and a tokenizer that only has to exist."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from meshrl.cli.demo.tiny_model import write_tiny_model

    write_tiny_model(path)
    torch.manual_seed(work.seed)
    Qwen3ForCausalLM(Qwen3Config(**work.model())).save_pretrained(path)


ROOMS = ("common", "proto", "transferqueue", "rollout", "rewardd", "trainer", "services")


def run(python: Path, side: str, order: dict[str, Any], place: Path = ROOT) -> dict[str, Any]:
    """One measurement, of the checkout in `place`."""
    environment = {"OMP_NUM_THREADS": str(order["threads"]), "HF_HUB_OFFLINE": "1"}
    if place != ROOT:
        environment["PYTHONPATH"] = os.pathsep.join(str(place / room) for room in ROOMS)
    done = subprocess.run(
        [python, place / "benchmarks" / "trainer_bench" / f"{side}.py", json.dumps(order)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{side} {order}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(work: Work, threads: int, steps: int) -> dict[str, Any]:
    """Both sides on one work."""
    rows = work.batch()
    tokens = sum(len(row.prompt) + len(row.response) for row in rows)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        write_model(work, model)
        common = {"work": work.json(), "model": str(model), "threads": threads, "steps": steps}
        orders: dict[str, tuple[Path, str, dict[str, Any]]] = {
            "meshrl": (Path(sys.executable), "ours", common)
        }
        for micro in sorted({GROUP, len(rows)}):
            for checkpointing in (True, False):
                name = f"trl, {micro} rows{', checkpointing' * checkpointing}"
                how = {"micro_rows": micro, "checkpointing": checkpointing, "directory": directory}
                orders[name] = (PEER, "peer", common | how)
        found, shown = {}, {}
        for name, order in orders.items():
            found[name] = run(*order)
            shown[name] = one = _summary(found[name], tokens)
            print(f"{work.name:5} {name:28} {json.dumps(one)}", flush=True)
    facts = found["meshrl"]["facts"]
    for name, one in found.items():
        for mine, theirs in zip(facts, one["facts"], strict=True):
            for key, value in mine.items():
                if abs(value - theirs[key]) > TOLERANCE * max(1e-3, abs(value)):
                    sys.exit(f"{work.name}: {key} is {value} in meshrl, {theirs[key]} in {name}")
    peers = [one for name, one in shown.items() if name != "meshrl"]
    ours = shown["meshrl"]
    fastest, thriftiest = (
        max(one[key] for one in peers) for key in ("tokens_per_s", "tokens_per_cpu_s")
    )
    leanest = min(one["mib_above_weights"] for one in peers)
    return {
        "rows": len(rows),
        "tokens": tokens,
        "padded_tokens": len(rows)
        * (max(len(r.prompt) for r in rows) + max(len(r.response) for r in rows)),
        "runs": shown,
        "loss": [fact["loss"] for fact in facts],
        "speedup": round(ours["tokens_per_s"] / fastest, 2),
        "cpu_speedup": round(ours["tokens_per_cpu_s"] / thriftiest, 2),
        "memory_share": round(ours["mib_above_weights"] / leanest, 3),
    }


def compare_builds(work: Work, threads: int, steps: int, other: Path) -> dict[str, Any]:
    """This checkout and another, in turn; the ratio is ours to theirs in tokens by processor time."""
    tokens = sum(len(row.prompt) + len(row.response) for row in work.batch())
    places = {"other": other.resolve(), "ours": ROOT}
    speeds: dict[str, list[float]] = {name: [] for name in places}
    losses = {}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        write_model(work, model)
        order = {"work": work.json(), "model": str(model), "threads": threads, "steps": steps}
        for _ in range(ROUNDS):
            for name, place in places.items():
                one = run(Path(sys.executable), "ours", order, place)
                speeds[name].append(_summary(one, tokens)["tokens_per_cpu_s"])
                losses[name] = [fact["loss"] for fact in one["facts"]]
    if any(abs(a - b) > TOLERANCE for a, b in zip(*losses.values(), strict=True)):
        sys.exit(f"{work.name}: the builds' losses differ: {losses}")
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    return {"tokens_per_cpu_s": speeds, "ratio": round(medians["ours"] / medians["other"], 3)}


def _summary(one: dict[str, Any], tokens: int) -> dict[str, float]:
    return {
        "tokens_per_s": round(tokens / statistics.median(one["seconds"][1:]), 1),
        "tokens_per_cpu_s": round(tokens / statistics.median(one["cpu_seconds"][1:]), 1),
        "mib_above_weights": round(one["bytes_above_weights"] / MIB, 1),
    }


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="the first warms up")
    parser.add_argument("--work", default="wide,demo")
    parser.add_argument("--against", type=Path, help="a checkout of another commit")
    given = parser.parse_args()
    works = {work.name: work for work in (WIDE, DEMO)}
    neighbours = Neighbours()
    result: dict[str, Any] = {"benchmark": "trainer_step", "threads": given.threads}
    if given.against:
        result["builds"] = {
            name: compare_builds(works[name], given.threads, given.steps, given.against)
            for name in given.work.split(",")
        }
        print(json.dumps(result | neighbours.seen()))
        return
    if not PEER.exists():
        sys.exit(f"{PEER}: no such file; `make venv-peer-trl` installs TRL")
    result["results"] = {
        name: compare(works[name], given.threads, given.steps) for name in given.work.split(",")
    }
    print(json.dumps(result | neighbours.seen()))


if __name__ == "__main__":
    main()
