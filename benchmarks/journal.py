"""The cost of keeping running responses in the queue: tokens per second with the journal and without, side by side.

    python benchmarks/journal.py [--pairs 12] [--tokens 256] [--store disk] [--journal-tokens 64]

A queue in a process of its own (store `disk`: every append is fsynced), a rollout worker with the torch engine in
this one, gRPC over loopback between them. A round samples 64 responses (8 groups of 8) of `--tokens` tokens each, all
at once, from the lease to the last row in the queue; the model is the one of engine.py (1 M parameters, so that a
decode step is short and the journal has the least time to hide in). Rounds with and without stand in pairs, in turn
first; the first pair warms up and is not counted. Beside the clock, which other work on the machine disturbs, stands
`overhead_bound`: the processor time that the journal adds to the thread of the event loop, as a share of all that the
process uses, which is what it would cost if decoding stood still meanwhile. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from engine import make_checkpoint

from meshrl.contract.ports import Queue
from meshrl.contract.types import ROLLOUT_STAGE, RunSpec, SamplingParams, Task, Version
from meshrl.rollout.config import CheckpointIntervals, RowSchedule
from meshrl.rollout.engines.torch import TorchEngine, build
from meshrl.rollout.worker import RolloutWorker
from meshrl.rpc.clients.queue import QueueClient
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.transferqueue import stores
from meshrl.transferqueue.config import QueueConfig
from meshrl.transferqueue.queue import TransferQueue

GROUPS, GROUP = 8, 8
FIRST = Version(1, 0)


class Numbers:
    """A tokenizer without words."""

    def decode(self, ids: Any) -> str:
        """Nothing that costs."""
        return ""


async def serve(path: Path, store: str) -> None:
    """The queue's process: prints its address, serves until stdin closes."""
    queue = await TransferQueue.open(stores.build(QueueConfig(store=store), path))
    async with GrpcServer(ServerSettings(metrics_port=None), [QueueServicer(queue)]) as server:
        print(server.address, flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await queue.close()


@contextlib.contextmanager
def queue_process(path: Path, store: str) -> Iterator[tuple[str, int]]:
    """Its address and process id."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(path), "--store", store],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.stdin.close()
        process.wait()


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def round_of(
    queue: Queue, engine: TorchEngine, run: str, tokens: int, journal: CheckpointIntervals | None
) -> dict[str, float]:
    """One run of one batch."""
    spec = RunSpec(
        run=run,
        group_size=GROUP,
        stages=(ROLLOUT_STAGE,),
        batch_groups=GROUPS,
        max_staleness=0,
    )
    await queue.open_run(spec)
    await queue.acquire(run, "trainer")
    await queue.publish(run, FIRST)
    sampling = SamplingParams(max_tokens=tokens)
    tasks = [
        Task(
            run=run,
            task_id=f"t{number}",
            prompt_ids=np.arange(1, 33, dtype=np.int32),
            group_size=GROUP,
            sampling=sampling,
        )
        for number in range(GROUPS)
    ]
    await queue.admit(run, tasks, cursor="", wait_s=60)
    worker = RolloutWorker(
        queue,
        engine,
        Numbers(),
        runs=[run],
        worker=run,
        schedule=RowSchedule(slots=GROUPS * GROUP, checkpoint=journal),
    )
    begin, cpu, loop = time.perf_counter(), time.process_time(), time.thread_time()
    working = asyncio.create_task(worker.run(grace_s=60))
    await queue.take(run, epoch=1, step=0, groups=GROUPS, batch_id="b", wait_s=600)
    seconds = time.perf_counter() - begin
    cpu, loop = time.process_time() - cpu, time.thread_time() - loop
    worker.drain()
    await working
    saved = worker.checkpointer.stats if worker.checkpointer else None
    return {
        "tokens_per_s": GROUPS * GROUP * tokens / seconds,
        "cpu_s": cpu,
        "loop_cpu_s": loop,
        "appends": saved.appends if saved else 0,
        "kept": saved.tokens if saved else 0,
    }


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Pairs of rounds."""
    parameters = make_checkpoint(folder / "model", 128, 4)
    engine = build(
        {"device": "cpu", "eos_token_ids": []}, model=folder / "model", slots=GROUPS * GROUP
    )
    await engine.start()
    await engine.serve_checkpoint(FIRST)
    journal = CheckpointIntervals(tokens=options.journal_tokens, ms=options.journal_ms)
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    with queue_process(folder / "queue", options.store) as (address, pid):
        async with QueueClient(address) as queue:
            for pair in range(options.pairs + 1):
                for saved in (True, False) if pair % 2 else (False, True):
                    before = cpu_s(pid)
                    how = journal if saved else None
                    one = await round_of(queue, engine, f"r{pair}{saved}", options.tokens, how)
                    one["queue_cpu_s"] = cpu_s(pid) - before
                    if pair:
                        found[saved].append(one)
                        print(
                            f"{pair:3} {'saved' if saved else 'not '} {pair_text(one)}", flush=True
                        )
    await engine.close()
    return summary(options, parameters, found)


def pair_text(one: dict[str, float]) -> str:
    """One round, to read."""
    return (
        f"{one['tokens_per_s']:8.0f} tokens/s {one['cpu_s']:6.2f} s CPU here ({one['loop_cpu_s']:.3f} loop)"
        f" {one['queue_cpu_s']:5.2f} s in the queue {one['appends']:3.0f} appends"
    )


def summary(
    options: argparse.Namespace, parameters: int, found: dict[bool, list[dict[str, float]]]
) -> dict[str, object]:
    """The JSON line."""
    pairs = list(zip(found[True], found[False], strict=True))

    def median(saved: bool, name: str) -> float:
        return statistics.median(one[name] for one in found[saved])

    speeds = [on["tokens_per_s"] / off["tokens_per_s"] for on, off in pairs]
    costs = [on["cpu_s"] / off["cpu_s"] for on, off in pairs]
    bound = statistics.median(on["loop_cpu_s"] - off["loop_cpu_s"] for on, off in pairs)
    low, _, high = statistics.quantiles(speeds, n=4)
    return {
        "benchmark": "journal",
        "parameters": parameters,
        "store": options.store,
        "journal_tokens": options.journal_tokens,
        "requests": GROUPS * GROUP,
        "tokens": options.tokens,
        "pairs": len(pairs),
        "tokens_per_s": round(median(True, "tokens_per_s")),
        "tokens_per_s_without": round(median(False, "tokens_per_s")),
        "overhead": round(1 - statistics.median(speeds), 4),
        "overhead_quartiles": [round(1 - high, 4), round(1 - low, 4)],
        "overhead_bound": round(bound / median(False, "cpu_s"), 4),
        "cpu_overhead": round(statistics.median(costs) - 1, 4),
        "queue_cpu_s_per_million_tokens": round(
            (median(True, "queue_cpu_s") - median(False, "queue_cpu_s"))
            / (GROUPS * GROUP * options.tokens)
            * 1e6,
            3,
        ),
        "appends_per_round": median(True, "appends"),
        "tokens_kept_per_round": median(True, "kept"),
    }


def main() -> None:
    """Measure, or serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--store", choices=["disk", "memory"], default="disk")
    parser.add_argument("--journal-tokens", type=int, default=CheckpointIntervals().tokens)
    parser.add_argument("--journal-ms", type=int, default=CheckpointIntervals().ms)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve, options.store))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(options, Path(folder)))))


if __name__ == "__main__":
    main()
