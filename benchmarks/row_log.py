"""What it costs training to keep its rows: the same steps with `trainer.log_rows` all and off, in turn.

    python benchmarks/row_log.py [--blocks 8] [--steps 4] [--work demo,wide]

A step here is what the trainer does between `take` and `settle`: it fetches its rows from a queue in this process,
computes on the compute thread, and with the log on also fetches texts and what judges saw, and hands the rows to the
thread that writes them. Batches are those of `trainer_step.py`, with 2,000 characters of text a row. Blocks of steps
with the log on and off follow one another, beginning with either in turn; a block ends when its files are written, so
the writer's time is all in it.

What is reported, as medians over pairs of neighbouring blocks: the cost by the clock; and, which others on the
machine disturb less, the log's own processor time (of the writer's thread, and of the event loop beyond what it takes
without) as a share of a step's. The larger the model, the smaller the share: the log's time grows with tokens, a
step's with tokens times parameters. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from trainer_step import write_model

# isort: split
from ours import batch_of, learner_of, rows_of
from work import DEMO, GROUP, WIDE, Work

from meshrl.contract.rows import reward_inputs, reward_write, rollout_write, trajectory
from meshrl.contract.types import (
    RESCORABLE_REWARD_STAGE,
    REWARD_INPUTS,
    ROLLOUT_STAGE,
    Message,
    Outcome,
    RowWrite,
    RunSpec,
    Sample,
    Score,
    Task,
    Trajectory,
    Version,
)
from meshrl.trainer.compute import Compute
from meshrl.trainer.distributed import World
from meshrl.trainer.learner.learner import Learner
from meshrl.trainer.trajectories.files import logged_files
from meshrl.trainer.trajectories.log import TrajectoryLog
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

TEXT = "so it follows that x is 42. " * 72
NOW = Version(1, 0)


async def fill(queue: TransferQueue, rows: Sequence[Trajectory]) -> None:
    """The rows with their scores, as the stages write them."""
    run, tasks = rows[0].uid.run, list(dict.fromkeys(row.uid.task for row in rows))
    stages = (ROLLOUT_STAGE, RESCORABLE_REWARD_STAGE)
    await queue.open_run(
        RunSpec(
            run=run,
            group_size=GROUP,
            batch_groups=len(tasks),
            max_staleness=float("inf"),
            stages=stages,
            gated=False,
        )
    )
    await queue.acquire(run, "benchmark")
    prompts = {row.uid.task: row.tokens[: row.prompt_length] for row in rows}
    await queue.admit(
        run,
        [Task(run=run, task_id=name, prompt_ids=prompts[name], group_size=GROUP) for name in tasks],
        cursor=tasks[-1],
        wait_s=1.0,
    )
    by_uid = {row.uid: row for row in rows}
    for stage in stages:
        lease = await queue.lease(
            [run], stage.name, worker="w", limit=len(rows), at_least=len(rows), wait_s=1.0
        )
        written = [_write(stage.name, by_uid[row.uid]) for row in lease.rows]
        await queue.write(run, stage.name, lease.token_of(), written)


def _write(stage: str, row: Trajectory) -> RowWrite:
    if stage == ROLLOUT_STAGE.name:
        return rollout_write(row, Outcome.OK, "stop", NOW)
    score = Score(uid=row.uid, outcome=Outcome.OK, score=row.reward or 0.0, components={"acc": 1.0})
    sample = Sample(
        uid=row.uid,
        data_source="benchmark",
        solution=row.response_text,
        ground_truth="42",
        extra_info={"index": row.uid.index},
        messages=(Message(role="user", content=TEXT),),
    )
    written = reward_write(score)
    return RowWrite(uid=row.uid, columns={**written.columns, REWARD_INPUTS: reward_inputs(sample)})


class TimedLog(TrajectoryLog):
    """Counts the processor time of its writer."""

    writer_s = 0.0

    def _write_all(self) -> None:
        begin = time.thread_time()
        super()._write_all()
        self.writer_s += time.thread_time() - begin


@dataclass(frozen=True)
class Spent:
    """Seconds of one block."""

    clock: float
    cpu: float
    """Of the whole process."""
    log: float
    """Of the processor, by the writer."""
    loop: float
    """Of the processor, by the event loop."""


async def block(
    queue: TransferQueue,
    learner: Learner,
    compute: Compute,
    log: TimedLog,
    steps: range,
    rows: list[Trajectory],
) -> Spent:
    """Some steps, their files included."""
    clocks = (time.perf_counter, time.process_time, lambda: log.writer_s, time.thread_time)
    begin = [clock() for clock in clocks]
    for step in steps:
        made = learner.schedule(replace(batch_of(rows), step=step))
        uids = made.uids(0)
        columns = await queue.fetch(made.batch.run, uids, learner.columns)
        own = [trajectory(*pair) for pair in zip(uids, columns, strict=True)]
        async with log.step(made, 1, queue) as observe:
            await compute.run(partial(learner.learn, made, own, step, None, observe))
    log.close()
    return Spent(*(clock() - start for clock, start in zip(clocks, begin, strict=True)))


async def measure(work: Work, blocks: int, steps: int, directory: Path) -> dict[str, Any]:
    """One batch."""
    write_model(work, directory / "model")
    world, queue = World.start("cpu"), await TransferQueue.open(MemoryStore())
    compute, learner = Compute(world.device), learner_of(directory / "model", work, world)
    rows = [replace(row, response_text=TEXT) for row in rows_of(work)]
    await fill(queue, rows)
    logs = {
        True: TimedLog(directory / "rows", tokenizer=directory / "model", keeps_inputs=True),
        False: TimedLog(directory / "none", share=0.0),
    }
    count = 0
    spent: dict[bool, list[Spent]] = {True: [], False: []}
    for number in range(blocks + 1):
        for on in (True, False) if number % 2 else (False, True):
            found = await block(
                queue, learner, compute, logs[on], range(count, count + steps), rows
            )
            count += steps
            if number:  # the first pair warms up
                spent[on].append(found)
    compute.close()
    await queue.close()
    world.close()
    files = logged_files(directory / "rows")
    pairs = list(zip(spent[True], spent[False], strict=True))
    tokens = sum(len(row.tokens) for row in rows)

    return {
        "work": work.name,
        "rows": len(rows),
        "tokens": tokens,
        "step_s": round(statistics.median(off.cpu for _, off in pairs) / steps, 4),
        "cost_by_the_clock": round(
            statistics.median(on.clock / off.clock - 1 for on, off in pairs), 5
        ),
        "share_of_processor_time": round(
            statistics.median((on.log + on.loop - off.loop) / off.cpu for on, off in pairs), 5
        ),
        "log_s": round(statistics.median(on.log for on, _ in pairs) / steps, 5),
        "bytes_per_row": round(files[-1].size / len(rows)),
        "bytes_per_token": round(files[-1].size / tokens, 2),
        "files": len(files),
    }


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--work", default="demo,wide")
    given = parser.parse_args()
    torch.set_num_threads(1)
    known = {"demo": DEMO, "wide": WIDE}
    results = []
    for name in given.work.split(","):
        with tempfile.TemporaryDirectory() as directory:
            work = known[name]
            results.append(asyncio.run(measure(work, given.blocks, given.steps, Path(directory))))
        print(json.dumps(results[-1]), flush=True)
    print(json.dumps({"benchmark": "row_log", "results": results}))


if __name__ == "__main__":
    main()
