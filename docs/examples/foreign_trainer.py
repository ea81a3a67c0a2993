"""Your own trainer on meshrl's queue: a plain PyTorch loop and a model of one matrix, without the rest of the mesh.

    python foreign_trainer.py --queue 127.0.0.1:7001 --folder runs/mine

Three parts work on one run. Here they are threads; elsewhere they may be processes on different machines:

    feeder    puts prompts                    run.put
    worker    samples answers, scores them    run.lease … lease.write
    trainer   REINFORCE with a group baseline QueueDataset … settle … checkpoint

The task is to answer each prompt with its double. Stop it at any moment, even with kill -9, and start it again: it
continues from its last checkpoint, and each row is trained once.
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
    lease_ttl_s=3,  # after this time without renewal other workers get a row
    max_staleness=1,  # rows are at most one optimizer step old when they are trained
    stages=(SAMPLE,),
)


class Policy:
    """The newest weights and their version, from which the worker samples."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logits = torch.zeros(VOCABULARY, VOCABULARY)
        self._version = Version(0, 0)

    def update(self, logits: torch.Tensor, version: Version) -> None:
        """Set the weights of a new version."""
        with self._lock:
            self._logits, self._version = logits.detach().clone(), version

    def read(self) -> tuple[torch.Tensor, Version]:
        """The logits [prompt, answer] and their version."""
        with self._lock:
            return self._logits, self._version


def feed(queue: Queue, steps: int) -> None:
    """Put prompts for `steps` batches. The cursor is stored with the tasks, so a restarted feeder continues there."""
    run = queue.open_run(SPEC)
    first = int(run.state().cursor or 0)
    for number in range(first, steps * BATCH_GROUPS):
        prompt = np.array([number % (VOCABULARY // 2)], dtype=np.int32)
        task = Task(run=SPEC.run, task_id=f"p{number}", prompt_ids=prompt, group_size=GROUP)
        run.put([task], cursor=str(number + 1))  # waits while the run is `max_staleness` ahead
    run.close_feed()


def sample(queue: Queue, policy: Policy) -> None:
    """Answer prompts until no more come. Rows that a lease does not write return to the queue."""
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
    """Sample one answer, with its log-probability and its reward."""
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
    """REINFORCE: -A π/μ, where A = reward - mean of the group, and μ is the policy that sampled the row."""
    reward = batch["reward"].values
    groups = int(batch.groups.max()) + 1
    mean = torch.zeros(groups).index_add(0, batch.groups, reward) / batch.groups.bincount()
    logprob = logits.log_softmax(-1)[batch["prompt"].values, batch["answer"].values]
    ratio = (logprob - batch["logprob"].values).exp()
    return -((reward - mean[batch.groups]) * ratio).mean()


def train(address: str, folder: Path, policy: Policy) -> list[float]:
    """Train; return the mean reward of each step."""
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
            policy.update(
                logits, Version(batch.epoch, batch.step + 1)
            )  # before `settle` publishes it
            dataset.settle(batch.step)
            rewards.append(float(batch["reward"].values.mean()))
            if dataset.step % 10 == 0:
                save(dataset, saved, logits, optimizer)
        save(dataset, saved, logits, optimizer)
    return rewards


def save(
    dataset: QueueDataset, path: Path, logits: torch.Tensor, optimizer: torch.optim.Optimizer
) -> None:
    """Save a checkpoint and commit it to the queue: rows of earlier steps never come again."""
    with dataset.checkpoint() as step:
        state = {"logits": logits.data, "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)


def main() -> None:
    """Run feeder and worker as threads, and the trainer in the main thread."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--queue", required=True, help="host:port")
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoint")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    policy = Policy()
    with Queue.connect(options.queue) as queue:
        run = queue.open_run(SPEC)
        threads = [
            threading.Thread(target=feed, args=(queue, options.steps), daemon=True),
            threading.Thread(target=sample, args=(queue, policy), daemon=True),
        ]
        for thread in threads:
            thread.start()
        rewards = train(options.queue, options.folder, policy)
        for thread in threads:
            thread.join()
        ledger = run.ledger()
    if rewards:
        print(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}")
    print(f"{ledger.trained} of {ledger.admitted} rows trained, once each")


if __name__ == "__main__":
    main()
