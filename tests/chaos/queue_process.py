"""A process that hosts a disk queue with a feeder, workers and a trainer on it, for test_queue_kill.py to kill.

    python queue_process.py QUEUE_DIR NOTES_DIR TASKS

Every acknowledgement is one line of NOTES_DIR/acknowledged, written before the next step depends on it. The trainer's
checkpoint (NOTES_DIR/checkpoint.json) holds the uids of all its steps: its "model" is the list of what it learned.
Prints `open` once the queue serves, `done` when every task is trained and committed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import numpy as np

from meshrl.contract.errors import EndOfDataError, FencedError, WaitTimeoutError
from meshrl.contract.nouns import (
    REFERENCE_STAGE,
    REWARD_STAGE,
    ROLLOUT_STAGE,
    LeasedRow,
    Outcome,
    RowFacts,
    RowWrite,
    RunSpec,
    Score,
    Task,
    Uid,
    Version,
)
from meshrl.contract.rows import reward_write, text_column
from meshrl.transferqueue.queue import TransferQueue
from meshrl.transferqueue.stores.disk import DiskStore

GROUP, BATCH, CHECKPOINT_EVERY = 3, 2, 2
SPEC = RunSpec(
    run="run",
    group_size=GROUP,
    batch_groups=BATCH,
    max_staleness=2.0,
    stages=(ROLLOUT_STAGE, REWARD_STAGE, REFERENCE_STAGE),
    lease_ttl_s=2.0,
    max_attempts=1000,
)


class Notes:
    """What the outside world was told, and the trainer's checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = os.open(folder / "acknowledged", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def tell(self, *words: object) -> None:
        """One write call, so that a kill leaves whole lines or none."""
        os.write(self._log, (" ".join(map(str, words)) + "\n").encode())

    def checkpoint(self) -> dict[str, list[str]]:
        """Uids by step."""
        path = self._folder / "checkpoint.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def save(self, steps: dict[str, list[str]]) -> None:
        temporary = self._folder / "checkpoint.tmp"
        temporary.write_text(json.dumps(steps))
        temporary.replace(self._folder / "checkpoint.json")


async def feed(queue: TransferQueue, notes: Notes, count: int) -> None:
    """Starts where the queue says that it stopped, and repeats itself a little."""
    cursor = int((await queue.run_state("run")).cursor or 0)
    at = max(0, cursor - 2)
    while at < count:
        chunk = [
            Task(
                run="run",
                task_id=f"t{number}",
                prompt_ids=np.array([number], dtype=np.int32),
                group_size=GROUP,
            )
            for number in range(at, min(count, at + 3))
        ]
        added = await queue.admit("run", chunk, cursor=str(at + len(chunk)), wait_s=60)
        for task in chunk[:added]:
            notes.tell("admitted", task.task_id)
        at += added
    await queue.close_feed("run")
    notes.tell("closed")


def answer(stage: str, row: LeasedRow, version: Version) -> RowWrite:
    """Payload that depends on nothing but the uid and the version."""
    if stage == "reward":
        return reward_write(Score(uid=row.uid, outcome=Outcome.OK, score=float(row.uid.index)))
    tokens = np.full(400, row.task.prompt_ids[0], dtype=np.int32)
    if stage == "reference":
        return RowWrite(uid=row.uid, columns={"ref_logprobs": np.zeros(400, np.float32)})
    return RowWrite(
        uid=row.uid,
        columns={
            "tokens": tokens,
            "loss_mask": np.ones(400, np.uint8),
            "rollout_logprobs": np.full(400, -1.0, np.float32),
            "spans": np.array([[version.epoch, version.step, 0, 400]], dtype=np.int64),
            "response_text": text_column(str(row.uid)),
        },
        facts=RowFacts(outcome=Outcome.OK, num_tokens=400, oldest=version, newest=version),
    )


async def work(queue: TransferQueue, notes: Notes, stage: str, worker: str) -> None:
    while True:
        version = (await queue.run_state("run")).published
        try:
            lease = await queue.lease(
                ["run"],
                stage,
                worker=worker,
                limit=4,
                version=version if stage == "rollout" else None,
                wait_s=0.5,
            )
        except WaitTimeoutError:
            continue
        except EndOfDataError:
            return
        rows = [answer(stage, row, version) for row in lease.rows]
        try:
            tokens = {row.uid: row.token for row in lease.rows}
            await queue.write("run", stage, tokens, rows)
        except FencedError:
            continue
        for row in rows:
            notes.tell("wrote", stage, row.uid)


async def train(queue: TransferQueue, notes: Notes) -> None:
    """Resumes at the checkpoint; its history of steps is what a model's weights would be."""
    steps = notes.checkpoint()
    step = len(steps)
    epoch = (await queue.acquire("run", f"trainer-{os.getpid()}")).epoch
    await queue.rewind("run", epoch=epoch, step=step)
    await queue.publish("run", Version(epoch, step))
    while True:
        try:
            batch = await queue.take(
                "run", epoch=epoch, step=step, groups=BATCH, batch_id=f"{epoch}-{step}", wait_s=60
            )
        except EndOfDataError:
            break
        uids = [row.uid for row in batch.rows]
        check_payload(uids, await queue.fetch("run", uids, ["tokens", "response_text", "reward"]))
        steps[str(step)] = [str(uid) for uid in uids]
        await queue.settle("run", epoch=epoch, step=step, batch_id=batch.batch_id)
        notes.tell("settled", step)
        step += 1
        await queue.publish("run", Version(epoch, step))
        if step % CHECKPOINT_EVERY == 0:
            await checkpoint(queue, notes, epoch, steps)
    await checkpoint(queue, notes, epoch, steps)


async def checkpoint(
    queue: TransferQueue, notes: Notes, epoch: int, steps: dict[str, list[str]]
) -> None:
    notes.save(steps)
    await queue.commit("run", epoch=epoch, step=len(steps))
    notes.tell("committed", len(steps))


def check_payload(uids: list[Uid], rows: object) -> None:
    for uid, columns in zip(uids, rows, strict=True):  # type: ignore[call-overload]
        assert set(columns["tokens"].tolist()) == {int(uid.task[1:])}, uid
        assert columns["response_text"].tobytes().decode() == str(uid), uid
        assert columns["reward"].tolist() == [float(uid.index)], uid


async def main(queue_dir: Path, notes_dir: Path, count: int) -> None:
    notes = Notes(notes_dir)
    queue = await TransferQueue.open(DiskStore(queue_dir, grow_bytes=1 << 20))
    await queue.open_run(SPEC)
    print("open", flush=True)
    async with asyncio.TaskGroup() as group:
        group.create_task(train(queue, notes))
        group.create_task(feed(queue, notes, count))
        for worker in range(2):
            group.create_task(work(queue, notes, "rollout", f"rollout-{worker}"))
        for stage in ("reward", "reference"):
            group.create_task(work(queue, notes, stage, stage))
    await queue.close()
    print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
