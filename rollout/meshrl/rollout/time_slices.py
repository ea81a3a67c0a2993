"""An engine that uses its device in turns with the trainer: it sleeps while the trainer has it.

              the trainer wants the device                  a version is committed, or nobody wants the device
    awake ──────────────────────────────────▶ asleep ──────────────────────────────────────────────▶ awake
            engine.sleep, lease.release                 lease.share, engine.commit_weights or .wake

consumes: the lease, commits of the weight plane. waits for: the trainer to want the device; then for its version, for
as long as a trainer lives that holds the device. unblocked by: the lease (the kernel frees that of a dead process),
a commit. produces: an engine that holds memory of the device only while this process holds the lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from typing_extensions import override

from meshrl.common.device_lease import DeviceLease
from meshrl.contract.ports import Engine, LocatedSink
from meshrl.contract.types import OnUpdate, Uint8, Version, WeightManifest

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""Seconds that an engine waits for an announced version; without one (the trainer died) it continues at once."""


@runtime_checkable
class SleepingEngine(Engine, Protocol):
    """An engine that can give up the memory of its device for a while."""

    @property
    def asleep(self) -> bool:
        """Whether it has given up the device's memory and samples nothing."""
        ...

    async def sleep(self) -> None:
        """Give up the memory of the device; idempotent. Requests stay and continue after the engine has woken.

        `commit_weights` wakes the engine with the new version.
        """
        ...

    async def wake(self) -> None:
        """Continue with the served version; idempotent. Before the first commit there is none to wake with."""
        ...


class TimeSlicedEngine(LocatedSink):
    """The weight plane's end of a sleeping engine: what it commits to, and what hands the device over."""

    def __init__(
        self, engine: SleepingEngine, lease: DeviceLease, *, woken: Callable[[], None]
    ) -> None:
        """`woken` is called whenever the engine may be given work again."""
        self._engine = engine
        self._lease = lease
        self._woken = woken
        self._turn = asyncio.Lock()
        """Held by who changes between asleep and awake."""
        self._has_device = asyncio.Event()
        self.turns = 0
        """How often the device was handed over."""

    @property
    @override
    def where(self) -> str:
        return self._engine.where if isinstance(self._engine, LocatedSink) else "the engine"

    async def start(self) -> None:
        """Start the engine once the device is free. Raises what the engine's start does."""
        await self._take()
        await self._engine.start()

    async def run(self) -> None:
        """Hand the device over whenever the trainer wants it, until cancelled.

        Raises:
            MeshError: the engine cannot give the device up; its process must end.
        """
        while True:
            await self._has_device.wait()
            await self._lease.wanted()
            async with self._turn:
                await self._engine.sleep()
                self._has_device.clear()
                self._lease.release()
                self.turns += 1
            await self._until_next_turn()

    @override
    async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
        """Stage a version; an engine that sleeps stages it in host memory."""
        await self._engine.stage_weights(manifest, buckets)

    async def commit_weights(self, version: Version, on_update: OnUpdate) -> None:
        """Serve `version`, awake. Running requests are drained under the version before, where they should be."""
        async with self._turn:
            await self._take()
            if on_update is OnUpdate.DRAIN and self._engine.stats().running:
                await self._engine.wake()
            await self._engine.commit_weights(version, on_update)
        self._woken()

    @override
    async def discard_weights(self, version: Version) -> None:
        await self._engine.discard_weights(version)

    async def _take(self) -> None:
        if not self._has_device.is_set():
            await self._lease.share()
            self._has_device.set()

    async def _until_next_turn(self) -> None:
        """Return when a commit has taken the device, or after it was taken because nobody wants it."""
        committed = asyncio.ensure_future(self._has_device.wait())
        idle = asyncio.ensure_future(self._lease.idle(PATIENCE_S))
        try:
            await asyncio.wait({committed, idle}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in (committed, idle):
                wait.cancel()
            await asyncio.gather(committed, idle, return_exceptions=True)
        async with self._turn:
            if not self._has_device.is_set():
                log.info(
                    "the device is free and no version comes: sampling continues with the last"
                )
                await self._take()
                await self._engine.wake()
                self._woken()
