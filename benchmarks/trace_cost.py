"""What tracing costs: of one row's spans in all services, and of a mesh in which it is switched off and on in turns.

    python benchmarks/trace_cost.py [--minutes 8] [--share 0.1]

First the spans of a row alone, with `run.trace` at 0, 0.1 and 1, medians of nine turns.

Then one `meshrl up` of 128 rows a step, with a learning rate that changes nothing and answers as short as the
demo's (32 tokens: the less a row costs, the more its spans weigh). It is on policy, so that each step has the work of
its own rows. All services switch between no tracing, `--share` and 1 at a signal, each once a round, in an order that
is drawn: a machine that slows down meets all three. At a switch each writes the spans that it still has, and says so.
Counted is the processor time of all services per trained row (each process's own clock, in ns), and what of it
tracing took: its functions and its writer's thread, by the clock of their thread. The last line is JSON: the mean
difference to no tracing in percent, which holds all that tracing does to a service and all noise of the machine,
and the share of tracing's own time, each with its 95 % confidence interval over the rounds.
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
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NamedTuple

from startup import HERE, LIMIT_S, RECIPE, ROOT, assets

from meshrl.contract import tracing
from meshrl.contract.types import Uid

SHARES = (0.0, 0.1, 1.0)
ROWS = 1000
ROUNDS = 9
BEFORE = 4
"""Steps before the first turn: imports and first batches are over."""
STEPS = 2
"""Of a turn."""


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


class Turn(NamedTuple):
    """Milliseconds of processor time per trained row."""

    all: float
    """Of the services."""
    own: float
    """Of tracing in them, and of the clock that measures it."""


class SwitchedMesh:
    """A running `meshrl up` whose services change the share of traced groups at a signal."""

    def __init__(self, folder: Path, changes: list[str], shares: tuple[float, ...]) -> None:
        self._folder, self._shares = folder, shares
        command = [sys.executable, "-m", "meshrl.cli", "up", "--plain", "--no-preload", str(RECIPE)]
        with (folder / "up.log").open("wb") as log:
            self._up = subprocess.Popen(
                [*command, *changes, f"run.dir={folder}/run", "run.trace=1"],
                cwd=ROOT,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(HERE / "trace_bench"),
                    "TRACE_FOLDER": str(folder),
                    "TRACE_SHARES": ",".join(map(str, shares)),
                },
                stdout=log,
                stderr=log,
            )

    def close(self) -> None:
        """End the run."""
        self._up.send_signal(signal.SIGINT)
        self._up.wait(LIMIT_S)

    def switch(self, share: float) -> tuple[float, float]:
        """From now on; returns the seconds of the services' processor time until then, and of tracing in them."""
        services = self._services()
        said = [self._folder / f"switched.{pid}" for pid in services]
        for pid, path in zip(services, said, strict=True):
            path.unlink(missing_ok=True)
            os.kill(pid, signal.SIGRTMIN + 1 + self._shares.index(share))
        deadline = time.monotonic() + LIMIT_S
        while not all(path.exists() for path in said):
            if time.monotonic() > deadline or self._up.poll() is not None:
                sys.exit(
                    f"the services do not answer:\n{(self._folder / 'up.log').read_text()[-2000:]}"
                )
            time.sleep(0.001)
        return sum(map(_processor_s, services)), sum(int(path.read_text()) for path in said) / 1e9

    def turn(self, share: float) -> Turn:
        """Some steps with this share."""
        before, (steps, trained) = self.switch(share), self.after_step(0)
        _, now = self.after_step(steps + STEPS)
        after = self.switch(share)
        return Turn(
            *(
                (until - since) / (now - trained) * 1e3
                for since, until in zip(before, after, strict=True)
            )
        )

    def after_step(self, step: int) -> tuple[int, int]:
        """Steps and rows that were trained, once so many steps are done."""
        metrics = self._folder / "run" / "metrics.jsonl"
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and self._up.poll() is None:
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            done = [line for line in lines if "reward/mean" in line and line.endswith("}")]
            if len(done) >= step:
                return len(done), sum(json.loads(line)["batch/rows"] for line in done)
            time.sleep(0.005)
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


def more(plain: Sequence[float], traced: Sequence[float]) -> dict[str, float]:
    """Than plain, in percent: differences of each round by the mean of plain, since a mean of ratios is too high."""
    mean = fmean(plain)
    return interval([(one - off) / mean * 100 for off, one in zip(plain, traced, strict=True)])


def interval(percent: Sequence[float]) -> dict[str, float]:
    """Mean, and its 95 % confidence interval (normal: there are dozens of rounds)."""
    mean, half = fmean(percent), 1.96 * stdev(percent) / len(percent) ** 0.5
    return {"mean": round(mean, 2), "from": round(mean - half, 2), "to": round(mean + half, 2)}


def small_rows(folder: Path) -> list[str]:
    """Overrides: rows as short as the demo's, 128 a step, on policy, by weights that stay."""
    return [
        *assets(folder)[:-1],
        *("trainer.total_epochs=100000", "trainer.test_freq=-1", "trainer.save_freq=100000"),
        *("actor.optim.lr=1e-12", "trainer.val_before_train=false", "queue.max_staleness=0"),
        *("data.max_response_length=32", "data.train_batch_size=16"),
    ]


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
    cost: dict[float, list[Turn]] = {share: [] for share in shares}
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        changes = [*small_rows(folder), "trainer.total_training_steps=100000"]
        mesh = SwitchedMesh(folder, changes, shares)
        try:
            mesh.after_step(BEFORE)
            until = time.monotonic() + 60 * options.minutes
            while len(cost[0.0]) < 2 or time.monotonic() < until:
                for share in draw.sample(shares, len(shares)):
                    cost[share].append(mesh.turn(share))
                told = ", ".join(f"{share}: {values[-1].all:.2f}" for share, values in cost.items())
                print(f"ms of processor time a row by run.trace {told}", flush=True)
        finally:
            mesh.close()
    plain = [turn.all for turn in cost[0.0]]
    result = {
        "us_per_row": {str(share): round(median(values), 1) for share, values in spans.items()},
        "mesh_ms_per_row": round(median(plain), 2),
        "rounds": len(plain),
        "percent": {
            str(share): more(plain, [turn.all for turn in cost[share]]) for share in shares[1:]
        },
        "own_percent": {
            str(share): interval([turn.own / turn.all * 100 for turn in cost[share]])
            for share in shares
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
