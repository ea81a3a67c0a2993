"""The TrainerControl port over a running loop: look, stop, save."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from meshrl.contract.errors import UnavailableError, WaitTimeoutError
from meshrl.contract.types import TrainerStatus
from meshrl.trainer.batch_source import BatchSource
from meshrl.trainer.status import Board

log = logging.getLogger(__name__)


class Control:
    """What others may ask of a trainer. It asks rank 0's intake, which the loop listens to between steps."""

    def __init__(self, board: Board, intake: BatchSource, drain: Callable[[], None]) -> None:
        self._board = board
        self._intake = intake
        self._drain = drain

    async def status(self) -> TrainerStatus:
        """How training does now."""
        return self._board.status()

    def watch(self, *, every_s: float = 10.0) -> AsyncIterator[TrainerStatus]:
        """A status at once, after every change and at least every `every_s` seconds; the last has ended."""
        return self._board.watch(every_s)

    async def stop(self, reason: str) -> None:
        """End after the running step, with a checkpoint."""
        log.info("asked to stop: %s", reason or "no reason given")
        self._drain()

    async def save_checkpoint(self, *, wait_s: float) -> int:
        """Save after the running step; returns its number of optimizer steps.

        Raises:
            WaitTimeoutError: it is not durable within `wait_s`; it will be saved all the same.
            UnavailableError: training has ended.
        """
        if self._board.status().phase.ended:
            raise UnavailableError("training has ended; its last checkpoint is saved")
        saved = self._intake.ask_to_save()
        try:
            async with asyncio.timeout(wait_s):
                return await asyncio.shield(saved)
        except TimeoutError as error:
            raise WaitTimeoutError(f"the checkpoint is not durable after {wait_s:.0f} s") from error
