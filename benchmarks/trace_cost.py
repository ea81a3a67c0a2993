"""What tracing costs: of one row's spans in all services, and of a mesh in which it is switched off and on in turns.

    python benchmarks/trace_cost.py [--minutes 8] [--share 0.1]

First the spans of a row alone, with `run.trace` at 0, 0.1 and 1, medians of nine turns.

Then one `meshrl up` of 128 rows a step, with a learning rate that changes nothing and answers as short as the
demo's (32 tokens: the less a row costs, the more its spans weigh). All services switch between no tracing, `--share`
and 1 at a signal, each once a round, in an order that is drawn: a machine that slows down meets all three. Counted is
the processor time of all services per trained row (each process's own clock, in ns). The first seconds of a turn do
not count: spans of the turn before are still written then. The last line is JSON, with the mean difference to no
tracing in percent, and its 95 % confidence interval over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median, stdev

from startup import LIMIT_S, RECIPE, ROOT, assets

from meshrl.contract import tracing
from meshrl.contract.types import Uid

SHARES = (0.0, 0.1, 1.0)
ROWS = 1000
ROUNDS = 9
BEFORE = 4
"""Steps before the first turn: imports and first batches are over."""
SETTLE_S = 1.5
"""Of a turn, left out; the writer of spans wakes each second."""
STEPS = 2
"""That count in a turn, at least."""
SIGNALS = (signal.SIGRTMIN + 1, signal.SIGRTMIN + 2, signal.SIGRTMIN + 3)
"""Each tells a service to trace with the share of the same place."""
SWITCH = '''
"""Lets this process switch between shares of traced groups at a signal."""
import signal, sys
kept = []
def switch(number, frame):
    tracing = sys.modules.get("meshrl.contract.tracing")
    if tracing is None or not (kept or tracing._tracer):
        return
    if not kept:
        kept.append(tracing._tracer)
    share = {shares}[number]
    kept[0]._share = share
    tracing._tracer = kept[0] if share else None
for number in {shares}:
    signal.signal(number, switch)
    signal.siginterrupt(number, False)
'''


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


class SwitchedMesh:
    """A running `meshrl up` whose services change the share of traced groups at a signal."""

    def __init__(self, folder: Path, changes: list[str], shares: tuple[float, ...]) -> None:
        numbers = {int(number): share for number, share in zip(SIGNALS, shares, strict=True)}
        (folder / "sitecustomize.py").write_text(SWITCH.replace("{shares}", repr(numbers)))
        self._folder, self._shares = folder, shares
        command = [sys.executable, "-m", "meshrl.cli", "up", "--plain", "--no-preload", str(RECIPE)]
        with (folder / "up.log").open("wb") as log:
            self._up = subprocess.Popen(
                [*command, *changes, f"run.dir={folder}/run", "run.trace=1"],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)},
                stdout=log,
                stderr=log,
            )

    def close(self) -> None:
        """End the run."""
        self._up.send_signal(signal.SIGINT)
        self._up.wait(LIMIT_S)

    def switch(self, share: float) -> None:
        """From now on."""
        for pid in self._services():
            os.kill(pid, SIGNALS[self._shares.index(share)])

    def turn(self, share: float) -> float:
        """Milliseconds of the services' processor time per trained row, in a turn of this share."""
        self.switch(share)
        until = time.monotonic() + SETTLE_S
        steps, *before = self.after_step(1)
        while time.monotonic() < until:
            steps, *before = self.after_step(steps + 1)
        _, *after = self.after_step(steps + STEPS)
        return (after[1] - before[1]) / (after[0] - before[0]) * 1e3

    def after_step(self, step: int) -> tuple[int, int, float]:
        """Steps, rows that were trained, and seconds of the services' processor time, once so many steps are done."""
        metrics = self._folder / "run" / "metrics.jsonl"
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and self._up.poll() is None:
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            done = [line for line in lines if "reward/mean" in line and line.endswith("}")]
            if len(done) >= step:
                rows = sum(json.loads(line)["batch/rows"] for line in done)
                return len(done), rows, sum(map(_processor_s, self._services()))
            time.sleep(0.02)
        sys.exit(f"no step {step}:\n{(self._folder / 'up.log').read_text()[-2000:]}")

    def _services(self) -> list[int]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if "serve" in words and any(str(self._folder) in word for word in words):
                found.append(int(process.name))
        return found


def _processor_s(pid: int) -> float:
    """Of all threads of a process, also those that have ended: clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


def interval(percent: list[float]) -> dict[str, float]:
    """Mean, and its 95 % confidence interval (normal: there are dozens of rounds)."""
    mean, half = fmean(percent), 1.96 * stdev(percent) / len(percent) ** 0.5
    return {"mean": round(mean, 2), "from": round(mean - half, 2), "to": round(mean + half, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--minutes", type=float, default=8, help="of rounds: one turn of each share"
    )
    parser.add_argument("--share", type=float, default=0.1, help="of traced groups, beside 0 and 1")
    options = parser.parse_args()
    spans: dict[float, list[float]] = {share: [] for share in SHARES}
    for turn in range(ROUNDS):
        for share in SHARES:
            spans[share].append(spans_alone(share, turn * ROWS))
    shares = (0.0, options.share, 1.0)
    cost: dict[float, list[float]] = {share: [] for share in shares}
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        changes = assets(folder)[:-1]
        changes += ["trainer.total_training_steps=100000", "trainer.total_epochs=100000"]
        changes += ["actor.optim.lr=1e-12", "trainer.test_freq=-1", "trainer.save_freq=100000"]
        changes += [
            "trainer.val_before_train=false",
            "data.max_response_length=32",
            "data.train_batch_size=16",
        ]
        mesh = SwitchedMesh(folder, changes, shares)
        try:
            mesh.after_step(BEFORE)
            until = time.monotonic() + 60 * options.minutes
            while len(cost[0.0]) < 2 or time.monotonic() < until:
                for share in draw.sample(shares, len(shares)):
                    cost[share].append(mesh.turn(share))
                told = ", ".join(f"{share}: {values[-1]:.2f}" for share, values in cost.items())
                print(f"ms of processor time a row by run.trace {told}", flush=True)
        finally:
            mesh.close()
    result = {
        "us_per_row": {str(share): round(median(values), 1) for share, values in spans.items()},
        "mesh_ms_per_row": round(median(cost[0.0]), 2),
        "rounds": len(cost[0.0]),
        "percent": {
            str(share): interval(
                [
                    (traced / plain - 1) * 100
                    for plain, traced in zip(cost[0.0], cost[share], strict=True)
                ]
            )
            for share in shares[1:]
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
