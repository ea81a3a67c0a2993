"""A reference whose weights are shared out over several ranks of this machine (FSDP): rank 0 says what to forward.

rank 0    rows ──broadcast──▶ every rank: forwards its share of the micro-batches ──gather──▶ rank 0
silence   rank 0 says so every IDLE_S, since a collective that waits longer than CONTROL_TIMEOUT_S fails
the end   rank 0 says so; a rank that dies fails the next collective of the others
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch.distributed.fsdp import register_fsdp_forward_method

from meshrl.contract.types import Int32
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model.policy import HfModel, Policy, shard
from meshrl.trainer.ranks.world import World

IDLE_S = 60.0
_END = b"end"

Micro = TypeVar("Micro")
"""The rows that are forwarded at once."""


def sharded(hf: HfModel, world: World, config: ModelConfig) -> Policy:
    """The frozen model, each rank with its share of every layer, of which one at a time is whole."""
    policy = shard(Policy(hf).eval().requires_grad_(False), hf, world, config)
    policy.set_reshard_after_forward(True, recurse=False)  # type: ignore[operator]  # an FSDPModule now
    register_fsdp_forward_method(policy, "top")
    return policy


class ReferenceRanks:
    """What the ranks say to each other. Rank 0 calls `send`, `idle` and `end`, the others `receive`; all the rest."""

    def __init__(self, world: World) -> None:
        self._world = world

    def idle(self) -> None:
        """Rank 0 has nothing to forward."""
        self._world.broadcast()

    def end(self) -> None:
        """There is nothing more to forward."""
        self._world.broadcast(_END)

    def send(self, rows: Sequence[Int32], temperature: float, top: int) -> None:
        """What `receive` gives the others."""
        head = {"lengths": [len(row) for row in rows], "temperature": temperature, "top": top}
        tokens = np.concatenate(rows).astype("<i4").tobytes()
        self._world.broadcast(json.dumps(head).encode() + b"\n" + tokens)

    def receive(self) -> tuple[list[Int32], float, int] | None:
        """The next rows with their temperature, and how many of the likeliest tokens are wanted; None at the end.

        Raises:
            InfraError: rank 0 is gone.
        """
        while not (message := self._world.broadcast()):
            pass
        if message == _END:
            return None
        head, _, tokens = message.partition(b"\n")
        said = json.loads(head)
        every = np.frombuffer(tokens, "<i4").astype(np.int32)
        ends = np.cumsum(said["lengths"])[:-1]
        return np.split(every, ends), said["temperature"], said["top"]

    def own(self, micros: Sequence[Micro]) -> list[Micro]:
        """The micro-batches that this rank forwards: every so manyth.

        All ranks forward equally often, since all put a layer together: a last one too many counts for nothing.
        """
        rank, size = self._world.rank, self._world.size
        rounds = [micros[first : first + size] for first in range(0, len(micros), size)]
        return [each[min(rank, len(each) - 1)] for each in rounds]

    def gathered(
        self, found: Sequence[tuple[torch.Tensor, ...]], count: int
    ) -> list[tuple[torch.Tensor, ...]]:
        """Of `count` micro-batches what the ranks found of their `own`: tensors on the CPU, of tokens first."""
        world = self._world
        mine = found[: len(range(world.rank, count, world.size))]
        every: list[tuple[torch.Tensor, ...]] = [()] * count
        for kind, like in enumerate(found[0]):
            parts = [each[kind] for each in mine]
            flat = torch.cat([part.reshape(-1) for part in parts] or [like.reshape(-1)[:0]])
            sizes = world.all_gather(np.array([len(part) for part in parts], dtype=np.int64))
            for rank, values in enumerate(world.all_gather(flat.numpy())):
                whole = torch.from_numpy(values).reshape(-1, *like.shape[1:])
                split = torch.split(whole, sizes[rank].tolist()) if len(sizes[rank]) else ()
                for number, part in zip(range(rank, count, world.size), split, strict=True):
                    every[number] = (*every[number], part)
        return every
