"""Rank 0 of a communicator whose other ranks are an inference server's own: broadcasts straight into engines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from meshrl.common import shared_buffers
from meshrl.common.config import read_options
from meshrl.config.weights import NcclConfig
from meshrl.contract.types import Uint8
from meshrl.weights.nccl.process import NcclProcess, environment


def build(options: Mapping[str, object]) -> NcclRoot:
    """Build with options of `NcclConfig`. Raises ConfigError for wrong ones, and where cupy is missing."""
    config = read_options(NcclConfig, options, where="rollout.engine.nccl")
    environment(config)
    return NcclRoot(config)


class NcclRoot:
    """Satisfies `meshrl.rollout.native_updates.vllm.BroadcastRoot`: one process, one communicator, used once."""

    def __init__(self, config: NcclConfig) -> None:
        self._process = NcclProcess(config)

    @property
    def alive(self) -> bool:
        """Its process runs."""
        return self._process.alive

    async def unique_id(self) -> bytes:
        """Start the process and make the id, bytes[128]. Raises ConfigError, UnavailableError."""
        await self._process.start()
        return await self._process.unique_id()

    async def join(self, size: int, unique_id: bytes, deadline_s: float) -> None:
        """Join the server's ranks and warm up with them; the process is killed past the deadline."""
        await self._process.join(size, unique_id, 0, deadline_s)

    async def broadcast(self, parts: Sequence[Uint8], deadline_s: float) -> None:
        """Send the parts back to back, as one broadcast of uint8. Raises UnavailableError, WaitTimeoutError."""
        (memory,) = shared_buffers.allocate([sum(part.nbytes for part in parts)])
        await asyncio.to_thread(np.concatenate, parts, out=memory)
        await self._process.broadcast(memory, deadline_s)

    def abort(self) -> None:
        """Kill the process; idempotent."""
        self._process.kill()

    async def close(self) -> None:
        """Let it abort the communicator and end; idempotent."""
        await self._process.leave()
