"""Growth with the fleet: 1,000 and 4,096 rollout workers and 64 trainer ranks in virtual time, in four modes.

    python benchmarks/scale.py [--workers 1000,4096] [--modes sync,bounded_4] [--steps 6]
    python benchmarks/scale.py --handlers

A worker has 4 slots, so that time goes to the number of workers, not of rows; the queue's code is the real one.
Responses have long tails and call tools, and weights travel at a given bandwidth. `processor_s` is what the
simulation took, `us_a_row` the same per row: level when nothing grows with the fleet.

`--handlers` measures the processor time of a call, on which the simulation builds: a queue process on a store in
memory, over gRPC, is leased from and written to by 1 row and by 64; the line through both gives a call and a row.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.contract.rows import rollout_write
from meshrl.contract.types import (
    ROLLOUT_STAGE,
    OnUpdate,
    Outcome,
    RunSpec,
    SamplingParams,
    Task,
    Trajectory,
    Version,
    VersionSpan,
)
from meshrl.planning.scale import run_setting
from meshrl.planning.setting import Lengths, Setting
from meshrl.rpc.queue_connection import connect_queue
from meshrl.testing.queue import queue_service

MODES = {
    "sync": (0.0, OnUpdate.DRAIN),
    "one_step_off": (1.0, OnUpdate.DRAIN),
    "bounded_4": (4.0, OnUpdate.IN_FLIGHT),
    "fully_async": (math.inf, OnUpdate.IN_FLIGHT),
}
GROUP, TOKENS, ROWS = 8, 1000, 4096
WEIGHT_BYTES, BYTES_PER_S = 16e9, 5e9
"""Bytes of the model, and their rate into each worker."""
FIRST = Version(1, 0)


def fleet(workers: int, mode: str, steps: int) -> dict[str, Any]:
    """One run."""
    bound, on_update = MODES[mode]
    setting = Setting(
        workers=workers,
        slots=4,
        tokens_per_s=400.0,
        lengths=Lengths(mean=1000, p99=6000, most=8192),
        group=GROUP,
        batch_groups=workers // 8,
        step_s=10.0,
        max_staleness=bound,
        on_update=on_update,
        transfer_s=WEIGHT_BYTES / BYTES_PER_S,
        commit_s=0.5,
        tool_calls=2,
        tool_s=5.0,
        ranks=64,
        most_rows=workers // 8 * GROUP * steps,
    )
    began = time.process_time()
    seen = run_setting(setting)
    took = time.process_time() - began
    rows = setting.batch_groups * GROUP * seen.steps
    return {
        "workers": workers,
        "mode": mode,
        "samples_per_h": round(seen.samples_per_h),
        "staleness": {str(age): round(share, 3) for age, share in seen.staleness.items()},
        "staleness_mean": round(seen.staleness_mean, 2),
        "rollout_idle": round(seen.rollout_idle, 3),
        "trainer_idle": round(seen.trainer_idle, 3),
        "queue_load": round(seen.queue_load, 3),
        "processor_s": round(took, 1),
        "us_a_row": round(1e6 * took / rows),
    }


def serve(address: Any) -> None:
    """A queue process."""

    async def until_killed() -> None:
        spec = RunSpec(
            run="bench",
            group_size=GROUP,
            batch_groups=ROWS,
            max_staleness=1,
            stages=(ROLLOUT_STAGE,),
        )
        async with queue_service([spec]) as at:
            address.send(at)
            await asyncio.Event().wait()

    asyncio.run(until_killed())


def processor_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def work(address: str, at_once: int, rows: int) -> None:
    """Lease and write `rows` rows, `at_once` in a call."""
    async with connect_queue(address) as queue:
        number = 0
        while number < rows:
            lease = await queue.lease(
                ["bench"],
                "rollout",
                worker="w",
                limit=at_once,
                at_least=at_once,
                version=FIRST,
                wait_s=5,
            )
            found = lease.rows
            number += len(found)
            writes = [
                rollout_write(
                    Trajectory(
                        uid=row.uid,
                        tokens=np.zeros(TOKENS, np.int32),
                        loss_mask=np.ones(TOKENS, np.uint8),
                        rollout_logprobs=np.zeros(TOKENS, np.float32),
                        spans=(VersionSpan(version=FIRST, start=0, end=TOKENS),),
                    ),
                    Outcome.OK,
                    "stop",
                    FIRST,
                )
                for row in found
            ]
            await queue.write_rows(
                "bench", "rollout", {row.uid: row.token for row in found}, writes
            )


async def fill(address: str, start: int) -> None:
    """Admit ROWS rows."""
    async with connect_queue(address) as queue:
        if not start:
            await queue.acquire("bench", "t")
            await queue.publish("bench", FIRST)
        tasks = [
            Task(
                run="bench",
                task_id=f"t{number}",
                prompt_ids=np.zeros(100, np.int32),
                group_size=GROUP,
                sampling=SamplingParams(max_tokens=TOKENS),
            )
            for number in range(start, start + ROWS // GROUP)
        ]
        await queue.admit("bench", tasks, cursor=str(start), wait_s=10)


def handlers() -> dict[str, float]:
    """Microseconds of the queue's processor: a call, and a row in it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    address = ours.recv()
    pid = process.pid or 0
    cost: dict[int, float] = {}
    try:
        for part, at_once in enumerate((64, 1, 64, 1)):  # the first two warm up
            asyncio.run(fill(address, part * ROWS))
            before = processor_s(pid)
            asyncio.run(work(address, at_once, ROWS))
            cost[at_once] = (processor_s(pid) - before) / ROWS
    finally:
        process.kill()
    # cost(k) a row = 2 x (call / k + row)
    call = (cost[1] - cost[64]) / 2 / (1 - 1 / 64)
    return {"call_us": round(1e6 * call), "row_us": round(1e6 * (cost[64] / 2 - call / 64), 1)}


def table(runs: list[dict[str, Any]]) -> str:
    """For people."""
    lines = [
        "| workers | mode | samples/h | staleness mean, share of rows | rollout idle | trainer idle | queue load"
        " | simulated in | us a row |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        ages = ", ".join(f"{age}: {share:.0%}" for age, share in run["staleness"].items())
        lines.append(
            f"| {run['workers']:,} | {run['mode']} | {run['samples_per_h']:,} | {run['staleness_mean']:.2f} ({ages})"
            f" | {run['rollout_idle']:.0%} | {run['trainer_idle']:.0%} | {run['queue_load']:.0%}"
            f" | {run['processor_s']} s | {run['us_a_row']:,} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="1000,4096")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--handlers", action="store_true")
    options = parser.parse_args()
    if options.handlers:
        print(json.dumps(handlers()))
        return
    runs = []
    for workers in map(int, options.workers.split(",")):
        for mode in options.modes.split(","):
            runs.append(fleet(workers, mode, options.steps))
            print(f"{workers} {mode}: {runs[-1]['processor_s']} s", flush=True)
    print(table(runs))
    print(json.dumps(runs))


if __name__ == "__main__":
    main()
