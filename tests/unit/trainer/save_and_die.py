"""Trainers that save all the time and are killed with -9 at random moments.

One process imports, then forks each round's ranks: a round costs tenths of a second. A rank fills its weights with
the number of the step, saves beside "training", and rank 0 reports which steps were committed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import cast

import torch

from meshrl.contract.ports import Queue
from meshrl.launcher.address_book import free_port
from meshrl.trainer.checkpoint.async_checkpointer import AsyncCheckpointer
from meshrl.trainer.checkpoint.checkpoint import TrainerState
from meshrl.trainer.config import ActorConfig, AlgorithmConfig, ModelConfig, TrainerConfig
from meshrl.trainer.learner.learner import Learner, StepSettings
from meshrl.trainer.learner.optimizer import Optimizers
from meshrl.trainer.learner.policy_gradient import PolicyGradient
from meshrl.trainer.loop.context import RunContext, TrainerSettings
from meshrl.trainer.model.policy import build_policy, open_hf
from meshrl.trainer.ranks.compute import Compute
from meshrl.trainer.ranks.world import World

LONGEST_S = 0.25


class Committed:
    """The queue's end of a commit: a line in a pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    async def commit(self, run: str, *, epoch: int, step: int) -> None:
        os.write(self._pipe, f"{step}\n".encode())


async def save_for_ever(model: Path, root: Path, pipe: int) -> None:
    world = World.start("cpu")
    policy = build_policy(open_hf(model), world, ModelConfig(path=model))
    actor = ActorConfig()
    objective = PolicyGradient(AlgorithmConfig(), actor, max_response_length=8)
    learner = Learner(
        policy, Optimizers(policy, actor.optim), objective, world, StepSettings(actor=actor)
    )
    settings = TrainerSettings(
        run="r", directory=root, owner="test", seed=0, trainer=TrainerConfig(),
        tokenizer=model, batch_groups=1, group_size=1, total_steps=None,
    )  # fmt: skip
    context = RunContext(
        settings=settings, queue=cast(Queue, Committed(pipe)), learner=learner,
        compute=Compute(world.device),
    )  # fmt: skip
    checkpointer = AsyncCheckpointer(context, step=0)
    await checkpointer.open()
    for step in range(1, 10_000):
        fill(policy, step)
        state = TrainerState(
            run="r", step=step, epoch=1, seed=0, world_size=world.size, kl_coef=0.0
        )
        await checkpointer.begin(state)
        # The next step changes the weights while this one's are on their way to the disk.
        fill(policy, -step)


@torch.no_grad()
def fill(policy: torch.nn.Module, value: float) -> None:
    for parameter in policy.parameters():
        parameter.fill_(value)


def round_of(model: Path, root: Path, ranks: int, draw: random.Random) -> int:
    """Kill every rank at a random moment after a first commit; the last step that was committed."""
    reading, writing = os.pipe()
    port = str(free_port("127.0.0.1"))
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.close(reading)
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
            )  # fmt: skip
            try:
                asyncio.run(save_for_ever(model, root, writing))
            finally:
                os._exit(1)
        children.append(child)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        committed = int(pipe.readline())
        time.sleep(draw.uniform(0.0, LONGEST_S))
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        return max([committed, *(int(line) for line in pipe if line.endswith("\n"))])


def main(model: str, target: str, ranks: int, rounds: int) -> None:
    draw = random.Random(ranks)
    for number in range(rounds):
        committed = round_of(Path(model), Path(target, str(number)), ranks, draw)
        print(number, committed, flush=True)
