"""What tracing costs: of one row's spans in all services, and of whole meshes with `run.trace` on and off, in turns.

    python benchmarks/trace_cost.py [--pairs 5] [--steps 15] [--share 0.1]

First the spans of a row alone, with `run.trace` at 0, 0.1 and 1, medians of nine turns. Then pairs of meshes of the
demo's size (`meshrl up`, a learning rate that changes nothing): the processor time of all services per trained row,
between the fourth step and the last, with `--share` and without. Others on the machine disturb processor time less
than the clock, but do disturb it: the percentages of all pairs are printed, not their median alone. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from startup import LIMIT_S, RECIPE, ROOT, assets

from meshrl.contract import tracing
from meshrl.contract.types import Uid

SHARES = (0.0, 0.1, 1.0)
ROWS = 1000
ROUNDS = 9
BEFORE = 4
"""Steps before the processor time counts: imports and first batches are over."""
TICKS = os.sysconf("SC_CLK_TCK")


def one_row(number: int) -> None:
    """What the services do with a row of one turn."""
    uid = Uid("demo", f"0-{number // 8}", number % 8)
    with tracing.row_span("rollout", uid, delivery=1), tracing.span("generate", turn=0) as span:
        if span is not None:
            span.attributes |= {"tokens": 33, "versions": "1.4", "finish_reason": "stop"}
    if tracing.is_on():
        for name in ("admit", "write", "reward", "write", "reference", "write", "learn"):
            tracing.record_rows(name, [uid], 1, step=5)


def spans_alone(share: float, first: int) -> float:
    """Microseconds of processor time per row, the writer's thread included."""
    with tempfile.TemporaryDirectory() as folder:
        tracing.start(Path(folder), "service", share)
        began = time.process_time()
        for number in range(first, first + ROWS):
            one_row(number)
        tracing.stop()
        return (time.process_time() - began) / ROWS * 1e6


def whole_mesh(changes: list[str], steps: int) -> float:
    """Milliseconds of the services' processor time per trained row."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "meshrl.cli", "up", "--plain", str(RECIPE), *changes]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with Path(directory, "up.log").open("wb") as log:
            up = subprocess.Popen(
                [*command, f"run.dir={directory}/run"],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
            )
        try:
            before = _after(BEFORE, up, Path(directory))
            after = _after(BEFORE + steps, up, Path(directory))
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(LIMIT_S)
    return (after[1] - before[1]) / (after[0] - before[0]) * 1e3


def _after(steps: int, up: subprocess.Popen[bytes], directory: Path) -> tuple[int, float]:
    """Rows that were trained, and seconds of the services' processor time, when so many steps are done."""
    metrics = directory / "run" / "metrics.jsonl"
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and up.poll() is None:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        done = [line for line in lines if "reward/mean" in line and line.endswith("}")]
        if len(done) >= steps:
            rows = sum(json.loads(line)["batch/rows"] for line in done)
            return rows, _processor_s(str(directory))
        time.sleep(0.05)
    sys.exit(f"no step {steps}:\n{(directory / 'up.log').read_text()[-2000:]}")


def _processor_s(directory: str) -> float:
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if directory in (process / "cmdline").read_text():
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])  # utime and stime in proc(5)
        except OSError:
            continue
    return total / TICKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5, help="meshes with and without tracing")
    parser.add_argument("--steps", type=int, default=15, help="training steps that are measured")
    parser.add_argument("--share", type=float, default=0.1, help="`run.trace` of the meshes")
    options = parser.parse_args()
    spans: dict[float, list[float]] = {share: [] for share in SHARES}
    for turn in range(ROUNDS):
        for share in SHARES:
            spans[share].append(spans_alone(share, turn * ROWS))
    found: dict[float, list[float]] = {0.0: [], options.share: []}
    with tempfile.TemporaryDirectory() as folder:
        changes = assets(Path(folder))[:-1]
        changes += ["trainer.total_training_steps=100000", "trainer.total_epochs=100000"]
        changes += ["actor.optim.lr=1e-12", "trainer.test_freq=-1", "trainer.save_freq=100000"]
        for pair in range(options.pairs):
            for share in sorted(found, reverse=pair % 2 == 1):
                each = whole_mesh([*changes, f"run.trace={share}"], options.steps)
                found[share].append(each)
                print(f"run.trace={share}: {each:.2f} ms of processor time a row", flush=True)
    percent = [
        (traced / plain - 1) * 100
        for plain, traced in zip(found[0.0], found[options.share], strict=True)
    ]
    result = {
        "us_per_row": {str(share): round(median(values), 1) for share, values in spans.items()},
        "share": options.share,
        "mesh_ms_per_row": round(median(found[0.0]), 2),
        "percent": round(median(percent), 2),
        "percent_of_pairs": [round(each, 2) for each in percent],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
