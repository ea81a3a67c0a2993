"""The cost of tracing: of one row's spans in all services, and of whole meshes with and without it, two at a time.

    python benchmarks/trace_cost.py [--minutes 20] [--shares 0.1,1] [--groups 4]

First the spans of a row alone, with `run.trace` at 0, 0.1 and 1, medians of nine turns.

Then two equal `meshrl up` side by side, of 8 rows a group, with a learning rate that changes nothing and answers as
short as the demo's (32 tokens: the less a row costs, the more its spans weigh). They are on policy, so that each step
has the work of its own rows. For some seconds one of them is traced and the other is not, then the other way round,
with each of `--shares` in turn. Whatever else the machine does slows down both in the same seconds, so their ratio
says little of it; and what makes one of the two cheaper for all of its life cancels when they change places. All
services switch at a signal, at the end of a step, and write the spans that they still have. Counted is the processor
time of all services per trained row (each process's own clock, in ns), and what of it tracing took: its functions
and its writer's thread, by the clock of their thread. The last line is JSON: how much more a traced row takes in
percent, which holds all that tracing does to a service, and the share of tracing's own time, each with its 95 %
confidence interval over the pairs of blocks. One thing is in both: with tracing, a server looks at the metadata of
each call.
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
from collections.abc import Sequence
from contextlib import ExitStack
from math import log
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NamedTuple

from startup import HERE, LIMIT_S, RECIPE, ROOT, assets

from meshrl.common import tracing
from meshrl.contract.types import Uid

SHARES = (0.0, 0.1, 1.0)
ROWS = 1000
ROUNDS = 9
BEFORE = 20
"""Steps before the first block: imports and first batches are over."""
BLOCK_S = 10.0


def one_row(number: int) -> None:
    """The spans of all services for a row of one turn."""
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


class Spent(NamedTuple):
    """Processor seconds of a mesh since its start, or in a block."""

    all_s: float
    """Seconds of processor time of the services."""
    own_s: float
    """The share of tracing in them, and of the clock that measures it."""
    rows: int
    """Trained rows."""

    def since(self, other: Spent) -> Spent:
        """The difference to `other`, which came before."""
        return Spent(*(now - then for now, then in zip(self, other, strict=True)))


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

    def edge(self, share: float) -> Spent:
        """Wait for the end of a step, go on with this share, and say what all was spent until then."""
        _, rows = self.after_step(self.after_step(0)[0] + 1)
        return Spent(*self.switch(share), rows)

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
    """Processor seconds of all threads of a process, also those that have ended: clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


def block(meshes: Sequence[SwitchedMesh], traced: int, share: float) -> tuple[Spent, Spent]:
    """The costs of the traced mesh and of the other one in some seconds."""
    before = [mesh.edge(share if at == traced else 0.0) for at, mesh in enumerate(meshes)]
    time.sleep(BLOCK_S)
    after = [mesh.edge(0.0) for mesh in meshes]
    spent = [now.since(then) for now, then in zip(after, before, strict=True)]
    return spent[traced], spent[1 - traced]


def interval(percent: Sequence[float]) -> dict[str, float]:
    """Mean, and its 95 % confidence interval (by Student's factor for 20 pairs; more have a slightly smaller one)."""
    mean, half = fmean(percent), 2.09 * stdev(percent) / len(percent) ** 0.5
    return {"mean": round(mean, 2), "from": round(mean - half, 2), "to": round(mean + half, 2)}


def small_rows(folder: Path, groups: int) -> list[str]:
    """Overrides: rows as short as the demo's, on policy, by weights that stay."""
    return [
        *assets(folder)[:-1],
        "trainer.total_epochs=100000",
        "trainer.test_freq=-1",
        "trainer.save_freq=100000",
        "actor.optim.lr=1e-12",
        "trainer.val_before_train=false",
        "queue.max_staleness=0",
        "data.max_response_length=32",
        f"data.train_batch_size={groups}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20, help="of blocks, for all shares")
    parser.add_argument("--shares", default="0.1,1", help="of traced groups, beside none")
    parser.add_argument("--groups", type=int, default=4, help="of a step, of 8 rows each")
    options = parser.parse_args()
    spans: dict[float, list[float]] = {share: [] for share in SHARES}
    for turn in range(ROUNDS):
        for share in SHARES:
            spans[share].append(spans_alone(share, turn * ROWS))
    shares = (0.0, *map(float, options.shares.split(",")))
    more: dict[float, list[float]] = {share: [] for share in shares[1:]}
    own: dict[float, list[float]] = {share: [] for share in shares[1:]}
    plain: list[float] = []
    with tempfile.TemporaryDirectory() as parent, ExitStack() as running:
        meshes = []
        for name in ("first", "second"):
            folder = Path(parent, name)
            folder.mkdir()
            changes = [*small_rows(folder, options.groups), "trainer.total_training_steps=100000"]
            meshes.append(SwitchedMesh(folder, changes, shares))
            running.callback(meshes[-1].close)
        for mesh in meshes:
            mesh.after_step(BEFORE)
        until = time.monotonic() + 60 * options.minutes
        pair = 0
        while pair < 2 or time.monotonic() < until:
            for share in shares[1:]:
                ratios = []
                for traced in (0, 1) if pair % 2 else (1, 0):
                    one, other = block(meshes, traced, share)
                    plain.append(other.all_s / other.rows * 1e3)
                    ratios.append(log(one.all_s / one.rows * other.rows / other.all_s))
                    own[share].append(one.own_s / one.all_s * 100)
                more[share].append(fmean(ratios) * 100)
                print(
                    f"run.trace={share}: {more[share][-1]:+.2f} %, its own time"
                    f" {fmean(own[share][-2:]):.2f} %; a row {plain[-1]:.2f} ms",
                    flush=True,
                )
            pair += 1
    result = {
        "us_per_row": {str(share): round(median(values), 1) for share, values in spans.items()},
        "mesh_ms_per_row": round(median(plain), 2),
        "pairs": pair,
        "percent": {str(share): interval(values) for share, values in more.items()},
        "own_percent": {str(share): interval(values) for share, values in own.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
