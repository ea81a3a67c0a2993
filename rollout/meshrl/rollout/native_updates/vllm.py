"""`update: native`: broadcasts versions through vLLM's own NCCL backend, so nothing of ours runs in its workers.

    /init_weight_transfer_engine {id} ─┐ together        /update_weights {names} ─┐ together, once a version
    root: init, warm-up               ─┘                 root: bucket, bucket …  ─┘

The ranks are root 0 and, from 1 on, the server's workers. Either side of a pair may fail while the other waits inside
NCCL for ever: the first failure ends both, the root's process is killed, and the server counts as half loaded.
Routes, bodies and the packing rule were read in vLLM 0.33.0.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshrl.contract.types import Uint8
from meshrl.rollout.server_engine.checkpoint import (
    TORCH_DTYPE,
    TensorRange,
    aligned,
    read_tensor_ranges,
)
from meshrl.rollout.server_engine.http import HttpClient


def pack(tensors: Sequence[TensorRange], buffer_bytes: int) -> list[tuple[TensorRange, ...]]:
    """The buckets, as the receiver will cut them; nearly in the given order, which keeps layers together."""
    waiting = list(tensors)
    buckets: list[tuple[TensorRange, ...]] = []
    while waiting:
        count = _fill(waiting, buffer_bytes)
        ordered = aligned(waiting[:count])
        # Ordered anew it may overflow sooner: what is left over opens the next bucket.
        used = _fill(ordered, buffer_bytes)
        buckets.append(ordered[:used])
        waiting[:count] = ordered[used:]
    return buckets


def update_info(buckets: Sequence[Sequence[TensorRange]]) -> dict[str, list[object]]:
    """The body of `/update_weights`: what comes, in its order."""
    tensors = [tensor for bucket in buckets for tensor in bucket]
    return {
        "names": [tensor.name for tensor in tensors],
        "dtype_names": [TORCH_DTYPE[tensor.dtype] for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
    }


def _fill(tensors: Sequence[TensorRange], buffer_bytes: int) -> int:
    """How many of the first tensors make a bucket."""
    sizes = accumulate(tensor.nbytes for tensor in tensors)
    return next(
        (number for number, size in enumerate(sizes, 1) if size > buffer_bytes), len(tensors)
    )


ROOT_RANKS = 1


class BroadcastRoot(Protocol):
    """Rank 0, in a process that can be killed."""

    @property
    def alive(self) -> bool:
        """Whether it can still broadcast."""
        ...

    async def unique_id(self) -> bytes:
        """An id for the communicator, bytes[128]."""
        ...

    async def join(self, size: int, unique_id: bytes, deadline_s: float) -> None:
        """Meet the other ranks, then one all-reduce of one float32 with them."""
        ...

    async def broadcast(self, parts: Sequence[Uint8], deadline_s: float) -> None:
        """Send the parts back to back, as one broadcast of uint8."""
        ...

    def abort(self) -> None:
        """Kill it; never waits."""
        ...

    async def close(self) -> None:
        """Leave the communicator and end."""
        ...


class RootBuilder(Protocol):
    """The `build` of the module that `rollout.engine.root` names."""

    def __call__(self, options: Mapping[str, object]) -> BroadcastRoot:
        """Raises ConfigError for options that it does not know."""
        ...


class NativeSender:
    """The communicator with one server. One call at a time."""

    def __init__(
        self,
        make_root: Callable[[], BroadcastRoot],
        *,
        buffer_bytes: int,
        join_s: float,
        update_s: float,
    ) -> None:
        """Deadlines: `join_s` for meeting the server's ranks, `update_s` for each bucket."""
        self._make_root = make_root
        self._buffer_bytes = buffer_bytes
        self._join_s = join_s
        self._update_s = update_s
        self._root: BroadcastRoot | None = None

    async def join(self, client: HttpClient) -> None:
        """Have a communicator with the server, unless there is one. Raises MeshError."""
        if self._root is not None and self._root.alive:
            return
        await self.close()
        world = int((await client.call("GET", "/get_world_size"))["world_size"])
        root = self._root = self._make_root()
        try:
            unique_id = await root.unique_id()
            info = {
                "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
                "rank_offset": ROOT_RANKS,
                "world_size": ROOT_RANKS + world,
                "packed": True,
                "packed_buffer_size_bytes": self._buffer_bytes,
            }
            init = client.call(
                "POST",
                "/init_weight_transfer_engine",
                json={"init_info": info},
                wait_s=self._join_s,
            )
            await _both(init, root.join(ROOT_RANKS + world, unique_id, self._join_s))
        except BaseException:
            root.abort()
            raise

    async def send(self, client: HttpClient, directory: Path) -> None:
        """Broadcast the version in `directory`; the server's update has been started.

        Raises:
            MeshError: the server refuses it, or a broadcast fails or misses its deadline.
        """
        file = directory / "model.safetensors"
        buckets = pack(await asyncio.to_thread(read_tensor_ranges, file), self._buffer_bytes)
        call = client.call("POST", "/update_weights", json={"update_info": update_info(buckets)})
        try:
            await _both(call, self._broadcast(file, buckets))
        except BaseException:
            if self._root is not None:
                self._root.abort()
            raise

    async def close(self) -> None:
        """Leave the communicator; idempotent. The server gets no call: it would wait for this rank."""
        root, self._root = self._root, None
        if root is not None:
            await root.close()

    async def _broadcast(self, file: Path, buckets: Sequence[Sequence[TensorRange]]) -> None:
        assert self._root is not None
        data = np.memmap(file, dtype=np.uint8, mode="r")
        for bucket in buckets:
            parts = [data[tensor.start : tensor.end] for tensor in bucket]
            await self._root.broadcast(parts, self._update_s)


async def _both(call: Coroutine[Any, Any, object], collective: Coroutine[Any, Any, None]) -> None:
    """Run a call to the server and the collective that it starts; the first failure cancels the other.

    If both have failed, the server's error is raised.
    """
    tasks = [asyncio.ensure_future(call), asyncio.ensure_future(collective)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
