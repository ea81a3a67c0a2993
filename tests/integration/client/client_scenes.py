"""Shared by the tests of the client: a queue process, a run with one stage, rows that differ from each other."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.client import LeasedRow, Outcome, RowFacts, RowWrite, RunSpec, StageSpec, Task, Version

GROUP = 2
STAGE = StageSpec(name="rollout", reads=(), writes=("tokens", "loss_mask", "reward"))


@contextmanager
def queue_process(directory: Path, *arguments: str) -> Iterator[str]:
    """The address of a disk queue in another process."""
    command = [sys.executable, str(Path(__file__).with_name("queue_host.py")), str(directory)]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def spec(run: str = "run", **changes: Any) -> RunSpec:
    fields: dict[str, Any] = {
        "group_size": GROUP,
        "batch_groups": 2,
        "max_staleness": math.inf,
        "resident_batches": 100,
        "stages": (STAGE,),
        "gated": False,
    }
    return RunSpec(run=run, **{**fields, **changes})


def tasks(count: int, run: str = "run") -> list[Task]:
    return [
        Task(
            run=run,
            task_id=f"t{number:03}",
            prompt_ids=np.array([number], dtype=np.int32),
            group_size=GROUP,
        )
        for number in range(count)
    ]


def answer(row: LeasedRow) -> RowWrite:
    """A row whose every token is the number of its task. Lengths differ."""
    length = 2 + (7 * int(row.task.prompt_ids[0]) + 3 * row.uid.index) % 11
    return RowWrite(
        uid=row.uid,
        columns={
            "tokens": np.full(length, row.task.prompt_ids[0], dtype=np.int32),
            "loss_mask": np.ones(length, dtype=np.uint8),
            "reward": np.array([row.uid.index], dtype=np.float32),
        },
        facts=RowFacts(
            outcome=Outcome.OK, num_tokens=length, oldest=Version(0, 0), newest=Version(0, 0)
        ),
    )


def fill(address: str, count: int, **changes: Any) -> None:
    """Open a run, put tasks, answer all of them, close the feed."""
    from meshrl.client.sync import Queue

    with Queue.connect(address) as queue:
        run = queue.open_run(spec(**changes))
        run.put(tasks(count, run.name))
        run.close_feed()
        remaining = count * GROUP
        while remaining:
            with run.lease("rollout", limit=64) as lease:
                run_rows = [answer(row) for row in lease.rows]
                assert lease.write(run_rows) == ()
                remaining -= len(run_rows)
