"""The cost of keeping a training's rows: the same steps with `trainer.log_rows` all and off, in turn.

    python benchmarks/row_log.py [--pairs 40] [--work demo,wide] [--groups 32]

A step here is what the trainer does between `take` and `settle`: it fetches its rows from a queue in this process,
computes on the compute thread, and with the log on also fetches texts and what judges saw, and hands the rows to the
thread that writes them. Batches are those of `trainer_step.py`, with 4 characters of text a token. Steps with the log
on and off follow one another, beginning with either in turn; a step ends when its file is written, so the writer's
time is all in it.

What is reported is processor time, which others on the machine disturb less than the clock: the log's own (of the
writer's thread, and of the event loop beyond what it takes without) as a share of a step, as medians of pairs, with
the interval that holds 95 % of 2,000 resamples of the pairs; and the whole process with the log beside the process
without, as the median of pairs. The larger the model, the smaller the share: the log's time grows with tokens, a
step's with tokens times parameters. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trainer_step import write_model

# isort: split
from ours import batch_of, learner_of, rows_of
from work import DEMO, GROUP, SMALL, WIDE, Work

from meshrl.contract.rows import reward_inputs, reward_write, rollout_write, trajectory
from meshrl.contract.types import (
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
    reward_stage,
)
from meshrl.trainer.learner.learner import Learner
from meshrl.trainer.ranks.world import Compute, World
from meshrl.trainer.trajectories.files import logged_files
from meshrl.trainer.trajectories.log import TrajectoryLog
from meshrl.trainer.trajectories.table import LoggedStep
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.memory import MemoryStore

TEXT = "so it follows that x is 42. " * 1000
TOKEN_CHARS = 4
PERCENTILES = (2.5, 97.5)
NOW = Version(1, 0)


async def fill(queue: TransferQueue, rows: Sequence[Trajectory]) -> None:
    """The rows with their scores, as the stages write them."""
    run, tasks = rows[0].uid.run, list(dict.fromkeys(row.uid.task for row in rows))
    stages = (ROLLOUT_STAGE, reward_stage(keep_inputs=True))
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
        await queue.write_rows(run, stage.name, lease.token_of(), written)


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
        messages=(Message(role="user", content=TEXT[: TOKEN_CHARS * row.prompt_length]),),
    )
    written = reward_write(score)
    return RowWrite(uid=row.uid, columns={**written.columns, REWARD_INPUTS: reward_inputs(sample)})


class TimedLog(TrajectoryLog):
    """Counts the processor time of its writer, whose thread stays."""

    writer_s = 0.0
    _handed = _done = 0

    def _hand_over(self, made: Callable[[], LoggedStep], what: str) -> None:
        def timed() -> LoggedStep:
            self._began = time.thread_time()
            return made()

        self._handed += 1
        super()._hand_over(timed, what)

    def _write(self, step: LoggedStep) -> None:
        super()._write(step)
        self.writer_s += time.thread_time() - self._began
        self._done += 1

    def wait_written(self) -> None:
        while self._done < self._handed:
            time.sleep(0.002)


@dataclass(frozen=True)
class Spent:
    """Seconds of one step."""

    cpu: float
    """Processor seconds of the whole process."""
    log: float
    """Processor seconds of the writer."""
    loop: float
    """Processor seconds of the event loop."""


async def step(
    queue: TransferQueue,
    learner: Learner,
    compute: Compute,
    log: TimedLog,
    number: int,
    rows: list[Trajectory],
) -> Spent:
    """One step, its file included."""
    clocks = (time.process_time, lambda: log.writer_s)
    begin, loop = [clock() for clock in clocks], time.thread_time()
    made = learner.schedule(replace(batch_of(rows), step=number))
    uids = made.uids(0)
    columns = await queue.fetch_rows(made.batch.run, uids, learner.columns)
    own = [trajectory(*pair) for pair in zip(uids, columns, strict=True)]
    async with log.step(made, 1, queue) as observe:
        await compute.run(partial(learner.learn, made, own, number, None, observe))
    loop = time.thread_time() - loop
    log.wait_written()
    return Spent(*(clock() - start for clock, start in zip(clocks, begin, strict=True)), loop=loop)


def share(on: Sequence[Spent], off: Sequence[Spent]) -> float:
    """The log's processor time by a step's: medians, for neighbours on the machine disturb single steps."""
    loop = statistics.median(one.loop - other.loop for one, other in zip(on, off, strict=True))
    own = statistics.median(each.log for each in on) + max(0.0, loop)
    return own / statistics.median(each.cpu for each in off)


async def measure(work: Work, pairs: int, directory: Path) -> dict[str, Any]:
    """One batch."""
    write_model(work, directory / "model")
    world, queue = World.start("cpu"), await TransferQueue.open(MemoryStore())
    compute, learner = Compute(world.device), learner_of(directory / "model", work, world)
    rows = [
        replace(row, response_text=TEXT[: TOKEN_CHARS * (len(row.tokens) - row.prompt_length)])
        for row in rows_of(work)
    ]
    await fill(queue, rows)
    logs = {
        True: TimedLog(directory / "rows", tokenizer=directory / "model", keeps_inputs=True),
        False: TimedLog(directory / "none", share=0.0),
    }
    spent: dict[bool, list[Spent]] = {True: [], False: []}
    for pair in range(pairs + 2):
        for on in (True, False) if pair % 2 else (False, True):
            found = await step(queue, learner, compute, logs[on], 2 * pair + on, rows)
            if pair > 1:  # the first two warm up
                spent[on].append(found)
    for log in logs.values():
        log.close()
    compute.close()
    await queue.close()
    world.close()
    files = logged_files(directory / "rows")
    on, off = spent[True], spent[False]
    tokens = sum(len(row.tokens) for row in rows)
    draws = np.random.default_rng(0).integers(0, pairs, (2000, pairs))
    shares = [share([on[i] for i in draw], [off[i] for i in draw]) for draw in draws.tolist()]
    ratios = [one.cpu / other.cpu - 1 for one, other in zip(on, off, strict=True)]
    return {
        "work": work.name,
        "rows": len(rows),
        "tokens": tokens,
        "pairs": pairs,
        "step_cpu_s": round(statistics.median(each.cpu for each in off), 4),
        "log_cpu_s": round(statistics.median(each.log for each in on), 5),
        "log_share": round(share(on, off), 5),
        "log_share_95": [round(float(p), 5) for p in np.percentile(shares, PERCENTILES)],
        "process_cpu_cost": round(statistics.median(ratios), 5),
        "bytes_per_row": round(files[-1].size / len(rows)),
        "bytes_per_token": round(files[-1].size / tokens, 2),
        "files": len(files),
    }


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--work", default="demo,wide")
    parser.add_argument("--groups", type=int, help="of 8 rows in a step")
    given = parser.parse_args()
    torch.set_num_threads(1)
    known = {work.name: work for work in (DEMO, SMALL, WIDE)}
    results = []
    for name in given.work.split(","):
        with tempfile.TemporaryDirectory() as directory:
            work = known[name]
            work = replace(work, groups=given.groups or work.groups)
            results.append(asyncio.run(measure(work, given.pairs, Path(directory))))
        print(json.dumps(results[-1]), flush=True)
    print(json.dumps({"benchmark": "row_log", "results": results}))


if __name__ == "__main__":
    main()
