"""The one thread that computes: collectives keep their order, and the event loop stays free for RPCs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from meshrl.contract.errors import InfraError
from meshrl.trainer.ranks.world import lost_peer

Result = TypeVar("Result")


class Compute:
    """Runs functions one after the other in a thread of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="trainer", initializer=self._enter
        )

    def _enter(self) -> None:
        if self._device.type == "cuda":  # the current device is a property of the thread
            torch.cuda.set_device(self._device)

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of `work()`.

        Raises:
            InfraError: another rank died while its collectives ran.
        """
        return await asyncio.get_running_loop().run_in_executor(self._pool, _with_peers, work)

    def close(self) -> None:
        """Wait for the running function and end the thread; idempotent."""
        self._pool.shutdown(wait=True)


def _with_peers(work: Callable[[], Result]) -> Result:
    try:
        return work()
    except RuntimeError as error:
        if lost := lost_peer(error):
            raise InfraError(lost) from error
        raise
