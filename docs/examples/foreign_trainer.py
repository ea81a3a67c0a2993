"""A trainer of your own on meshrl's queue: a plain PyTorch loop, a model of one matrix, no other part of the mesh.

    python foreign_trainer.py --queue 127.0.0.1:7001 --folder runs/mine

Three people work on one run, here as three threads; anywhere else as processes on as many machines:

    feeder    puts prompts                    run.put
    worker    samples answers, scores them    run.lease … lease.write
    trainer   REINFORCE with a group baseline QueueDataset … settle … checkpoint

The task is to answer each prompt with its double. Stop it at any moment, kill -9 included, and start it again: it
goes on at its last checkpoint, and each row counts once.
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

from meshrl.client import (
    EndOfDataError,
    LeasedRow,
    Outcome,
    RowFacts,
    RowWrite,
    RunSpec,
    StageSpec,
    Task,
    Version,
    WaitTimeoutError,
)
from meshrl.client.dataset import QueueDataset
from meshrl.client.sync import Queue
from meshrl.client.tensors import TensorBatch

VOCABULARY, GROUP, BATCH_GROUPS = 8, 8, 8
SAMPLE = StageSpec(name="sample", reads=(), writes=("prompt", "answer", "logprob", "reward"))
SPEC = RunSpec(
    run="doubles",
    group_size=GROUP,
    batch_groups=BATCH_GROUPS,
    lease_ttl_s=3,  # a worker that died is silent for so long before others get its rows
    max_staleness=1,  # rows are at most one optimizer step old when they are trained
    stages=(SAMPLE,),
)


class Policy:
    """What the worker samples from: the newest weights, and their version."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logits = torch.zeros(VOCABULARY, VOCABULARY)
        self._version = Version(0, 0)

    def update(self, logits: torch.Tensor, version: Version) -> None:
        """The trainer has made a version."""
        with self._lock:
            self._logits, self._version = logits.detach().clone(), version

    def read(self) -> tuple[torch.Tensor, Version]:
        """Logits of each answer to each prompt, and whose they are."""
        with self._lock:
            return self._logits, self._version


def feed(queue: Queue, steps: int) -> None:
    """Prompts for `steps` batches. The cursor is stored with the tasks: a feeder that comes back goes on there."""
    run = queue.open_run(SPEC)
    first = int(run.state().cursor or 0)
    for number in range(first, steps * BATCH_GROUPS):
        prompt = np.array([number % (VOCABULARY // 2)], dtype=np.int32)
        task = Task(run=SPEC.run, task_id=f"p{number}", prompt_ids=prompt, group_size=GROUP)
        run.put([task], cursor=str(number + 1))  # waits while the run is `max_staleness` ahead
    run.close_feed()


def sample(queue: Queue, policy: Policy) -> None:
    """Answers prompts until no more come. What a lease does not write goes back to the queue by itself."""
    run = queue.open_run(SPEC)
    while True:
        logits, version = policy.read()
        try:
            with run.lease("sample", limit=GROUP, wait_s=1.0, version=version) as lease:
                lease.write([answer(row, logits, version) for row in lease.rows])
        except WaitTimeoutError:
            continue
        except EndOfDataError:
            return


def answer(row: LeasedRow, logits: torch.Tensor, version: Version) -> RowWrite:
    """One sampled answer with its log-probability and its reward."""
    prompt = int(row.task.prompt_ids[0])
    distribution = torch.distributions.Categorical(logits=logits[prompt])
    drawn = distribution.sample()
    reward = float(int(drawn) == 2 * prompt)
    return RowWrite(
        uid=row.uid,
        columns={
            "prompt": np.array([prompt], dtype=np.int64),
            "answer": np.array([int(drawn)], dtype=np.int64),
            "logprob": np.array([float(distribution.log_prob(drawn))], dtype=np.float32),
            "reward": np.array([reward], dtype=np.float32),
        },
        facts=RowFacts(outcome=Outcome.OK, num_tokens=2, oldest=version, newest=version),
    )


def loss_of(logits: torch.Tensor, batch: TensorBatch) -> torch.Tensor:
    """REINFORCE: -A π/μ, A = reward - mean of the group, μ what the row was sampled with."""
    reward = batch["reward"].values
    groups = int(batch.groups.max()) + 1
    mean = torch.zeros(groups).index_add(0, batch.groups, reward) / batch.groups.bincount()
    logprob = logits.log_softmax(-1)[batch["prompt"].values, batch["answer"].values]
    ratio = (logprob - batch["logprob"].values).exp()
    return -((reward - mean[batch.groups]) * ratio).mean()


def train(address: str, folder: Path, policy: Policy) -> list[float]:
    """The trainer; returns the mean reward of each step."""
    logits = torch.zeros(VOCABULARY, VOCABULARY, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.3)
    saved, step, rewards = folder / "checkpoint.pt", 0, []
    if saved.exists():
        state = torch.load(saved)
        logits.data.copy_(state["logits"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    with QueueDataset(address, run=SPEC.run, groups=BATCH_GROUPS, step=step) as dataset:
        policy.update(logits, Version(dataset.position.epoch, step))
        for batch in DataLoader(dataset, batch_size=None):
            optimizer.zero_grad()
            loss_of(logits, batch).backward()
            optimizer.step()
            policy.update(logits, Version(batch.epoch, batch.step + 1))  # before `settle` tells
            dataset.settle(batch.step)
            rewards.append(float(batch["reward"].values.mean()))
            if dataset.step % 10 == 0:
                save(dataset, saved, logits, optimizer)
        save(dataset, saved, logits, optimizer)
    return rewards


def save(
    dataset: QueueDataset, path: Path, logits: torch.Tensor, optimizer: torch.optim.Optimizer
) -> None:
    """A checkpoint that the queue knows of: rows of earlier steps leave it for good."""
    with dataset.checkpoint() as step:
        state = {"logits": logits.data, "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)


def main() -> None:
    """Feeder and worker as threads, the trainer here."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--queue", required=True, help="host:port")
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoint")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    policy = Policy()
    with Queue.connect(options.queue) as queue:
        run = queue.open_run(SPEC)
        others = [
            threading.Thread(target=feed, args=(queue, options.steps), daemon=True),
            threading.Thread(target=sample, args=(queue, policy), daemon=True),
        ]
        for other in others:
            other.start()
        rewards = train(options.queue, options.folder, policy)
        for other in others:
            other.join()
        ledger = run.ledger()
    if rewards:
        print(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}")
    print(f"{ledger.trained} of {ledger.admitted} rows trained, once each")


if __name__ == "__main__":
    main()
