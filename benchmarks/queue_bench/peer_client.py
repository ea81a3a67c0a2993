"""The peer's clients, in the peer's environment: TransferQueue's asynchronous client at its best settings.

    python peer_client.py ROLE NUMBER CONFIG.pickle SEED '{"in_flight": 2, ...}'

It is asked over ZMQ without Ray in between, puts jagged tensors (its fastest ragged form), has several calls in
flight, and polls every few milliseconds, since it has no way to wait.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"TQ_LOGGING_LEVEL": "ERROR"}

import numpy as np
import torch
from child import Timer, serve
from tensordict import TensorDict
from transfer_queue.client import AsyncTransferQueueClient
from work import BATCH, GROUP, SAMPLED, Group, annotate, digest, group, starts_of

COLUMNS = [*SAMPLED, "ref_logprobs", "reward"]


def jagged(rows: list[Any]) -> torch.Tensor:
    """A nested tensor of ragged rows, by one concatenation."""
    ends = np.concatenate((starts_of(rows), [sum(map(len, rows))]))
    return jagged_like(np.concatenate(rows), torch.from_numpy(ends))


def jagged_like(values: Any, offsets: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(torch.from_numpy(values), offsets)


class Client:
    """The part that all roles share."""

    def __init__(self, number: int, config: Any, seed: int, tuning: dict[str, Any]) -> None:
        self.number, self.seed = number, seed
        self.in_flight = tuning["in_flight"]
        self.annotated_at_least = tuning["annotated_rows"]
        self.poll_s = tuning["poll_ms"] / 1e3
        name = f"{type(self).__name__}-{number}"
        self.client = AsyncTransferQueueClient(name, config.controller.zmq_info)
        backend = config.backend.storage_backend
        self.client.initialize_storage_manager(backend, config.backend[backend])
        self.time = Timer()
        self.name, self.count = "", 0
        self.rows = self.annotated_rows = 0

    async def prepare(self, order: dict[str, Any]) -> None:
        self.name, self.count, self.rows = order["name"], order["groups"], order["rows"]
        self.annotated_rows = max(self.rows, self.annotated_at_least)
        self.time.ms.clear()

    def report(self) -> dict[str, Any]:
        return {"ms": self.time.ms}

    def verify(self) -> dict[str, Any]:
        return {}

    async def ready(self, task: str, columns: list[str], rows: int) -> Any:
        """Ask until so many rows are there."""
        while True:
            meta = await self.client.async_get_meta(
                columns, rows, self.name, task_name=task, sampling_config={}
            )
            if meta.size:
                return meta
            await asyncio.sleep(self.poll_s)


class Producer(Client):
    """Puts every second group."""

    async def prepare(self, order: dict[str, Any]) -> None:
        await super().prepare(order)
        self.groups = [group(self.seed, n) for n in range(self.number, self.count, 2)]
        self.began = 0.0

    async def work(self) -> None:
        size = self.rows // GROUP
        parts = [self.groups[at : at + size] for at in range(0, len(self.groups), size)]
        self.began = time.monotonic()
        waiting = iter(parts)

        async def worker_loop() -> None:
            for part in waiting:
                with self.time():
                    await self.put(part)

        await asyncio.gather(*(worker_loop() for _ in range(self.in_flight)))

    async def put(self, part: list[Group]) -> None:
        columns = {
            name: jagged([row for given in part for row in getattr(given, name)])
            for name in SAMPLED
        }
        data = TensorDict(columns, batch_size=len(part) * GROUP)
        await self.client.async_put(data, partition_id=self.name)

    def report(self) -> dict[str, Any]:
        return {"began": self.began, **super().report()}


class Annotator(Client):
    """Reads the tokens, puts reward and reference log-probs."""

    async def work(self) -> None:
        left = self.count * GROUP // self.annotated_rows

        async def worker_loop() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                meta = await self.ready("annotate", ["tokens"], self.annotated_rows)
                await self.annotate(meta)

        await asyncio.gather(*(worker_loop() for _ in range(self.in_flight)))

    async def annotate(self, meta: Any) -> None:
        tokens = (await self.client.async_get_data(meta))["tokens"]
        offsets = tokens.offsets()
        reward, reference = annotate(tokens.values().numpy(), offsets[:-1].numpy())
        columns = {
            "reward": torch.from_numpy(reward).unsqueeze(1),
            "ref_logprobs": jagged_like(reference, offsets),
        }
        data = TensorDict(columns, batch_size=len(reward))
        with self.time():
            await self.client.async_put(data, metadata=meta)


class Consumer(Client):
    """Takes batches; two are on their way at a time. Keeps what arrived, to verify it after the clock has stopped."""

    async def prepare(self, order: dict[str, Any]) -> None:
        await super().prepare(order)
        self.batches: list[Any] = []

    async def work(self) -> None:
        left = self.count * GROUP // BATCH

        async def worker_loop() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                with self.time():
                    meta = await self.ready("train", COLUMNS, BATCH)
                    self.batches.append(await self.client.async_get_data(meta))

        await asyncio.gather(worker_loop(), worker_loop())

    def verify(self) -> dict[str, Any]:
        arrived = []
        for batch in self.batches:
            columns = {name: [t.numpy() for t in batch[name].unbind(0)] for name in COLUMNS}
            arrived += [
                digest(row[-1].item(), *row[:-1])
                for row in zip(*(columns[name] for name in COLUMNS), strict=True)
            ]
        return {"arrived": arrived}


ROLES = {"producer": Producer, "annotator": Annotator, "consumer": Consumer}


if __name__ == "__main__":
    role, number, config, seed, tuning = sys.argv[1:]
    torch.set_num_threads(1)
    loaded = pickle.loads(Path(config).read_bytes())
    client = ROLES[role](int(number), loaded, int(seed), json.loads(tuning))
    asyncio.run(serve(client))
