"""The boxes of one worker: a bounded number, images made before boxes start, boxes started before rows want them.

    row ──box(image)──▶ image prepared? ──▶ a free place ──▶ a warm box, or a new one ──▶ row ──▶ closed

consumes: rows' wishes for boxes. waits for: an image (made once, for all rows that want it), a place, a start.
unblocked by: the backend; a box that is closed. produces: boxes, each closed when its row ends, in whatever way. The
worker leases as many rows as there are boxes, and others in place of those that wait for an image (`most_rows`).
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from meshrl.contract.errors import ConfigError
from meshrl.rollout.config import ContainersConfig
from meshrl.rollout.containers.box import Backend, Box, BoxLimits, Image, ImageError

log = logging.getLogger(__name__)

CLOSE_S = 30.0
"""Seconds that closing a box may take; the backend's next sweep removes what stays."""
TRY_AGAIN_S = 300.0
"""Seconds for which an image that could not be made fails at once."""
FRESH_S = 60.0
"""A warm box that is older is replaced: its time runs from its start."""


@dataclass(slots=True)
class PoolStats:
    """Counts since the start."""

    started: int = 0
    warm: int = 0
    """Boxes that were there when a row wanted one."""
    failed: int = 0
    """Images that could not be made, and starts that failed."""
    start_s: float = 0.0
    """Seconds of all starts together."""
    wait_s: float = 0.0
    """Seconds that rows waited for their boxes, images and places included."""


@dataclass(slots=True)
class _ImageInTheMaking:
    """An image, from the first row that wants it."""

    task: asyncio.Task[None]
    began: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class _Warm:
    wanted: tuple[Image, BoxLimits]
    box: Box
    started: float


def build_backend(config: ContainersConfig) -> Backend:
    """The backend that a recipe names. Raises ConfigError where it cannot work here."""
    for path in config.lent:
        if not path.is_dir():
            raise ConfigError(f"rollout.containers.lent: no folder {path} here")
    name = "engine" if config.backend in ("podman", "docker") else config.backend
    module = importlib.import_module(f"meshrl.rollout.containers.{name}")
    backend: Backend = module.build(config)
    return backend


class Pool:
    """Gives each row a box of its own; used by one event loop."""

    def __init__(
        self, backend: Backend, config: ContainersConfig, *, wake: Callable[[], None] = lambda: None
    ) -> None:
        """`wake` is called when `most_rows` has grown."""
        self.stats = PoolStats()
        self.wake = wake
        self.limits = config.limits
        """Limits of a box, where its row names none."""
        self.listens = config.backend != "kubernetes"
        """Whether `Box.listen` works."""
        self._backend = backend
        self._config = config
        self._places = asyncio.Semaphore(config.boxes)
        self._starts = asyncio.Semaphore(config.starts)
        self._images: dict[Image, _ImageInTheMaking] = {}
        self._waiting: Counter[Image] = Counter()
        self._warm: list[_Warm] = []
        self._warming = 0
        self._beside: set[asyncio.Task[None]] = set()
        self.running = 0
        """Boxes of rows, those that start included."""

    @property
    def most_rows(self) -> int:
        """Rows that can be worked on: one for each box, and one more for each that waits for its image."""
        return self._config.boxes + min(self._config.boxes, self._waiting.total())

    @property
    def waits_for(self) -> str:
        """The image that rows have waited for longest; empty where none waits."""
        waiting = [image for image, rows in self._waiting.items() if rows]
        if not waiting:
            return ""
        longest = min(waiting, key=lambda image: self._images[image].began)
        waited = time.monotonic() - self._images[longest].began
        rows = self._waiting[longest]
        return f"the image {longest.name}, in the making for {waited:.0f} s ({rows} of its rows)"

    async def start(self) -> None:
        """Remove what dead workers of this machine left. Raises UnavailableError: the engine does not answer."""
        if swept := await self._backend.sweep():
            log.warning("%d boxes of workers that are no more were removed", swept)

    @asynccontextmanager
    async def box(
        self, image: Image, *, row: str, limits: BoxLimits | None = None
    ) -> AsyncIterator[Box]:
        """A box of `image` for `row`, removed at the end of the block.

        Args:
            image: Made first, if it is not there.
            row: For the box's labels.
            limits: None: the recipe's.

        Raises:
            ImageError: the image cannot be made, or no box starts from it.
            UnavailableError: the engine does not answer.
        """
        wanted, began = (image, limits or self.limits), time.monotonic()
        await self._made(image)
        async with self._places:
            self.running += 1
            try:
                box = await self._take(wanted, row)
                self.stats.wait_s += time.monotonic() - began
                try:
                    self._refill(wanted)
                    yield box
                finally:
                    await asyncio.shield(self._do(self._close(box)))
            finally:
                self.running -= 1

    async def close(self) -> None:
        """Close warm boxes, wait for those that are being closed, and close the backend; idempotent."""
        for making in self._images.values():
            making.task.cancel()
        while self._warm or self._beside:
            for warm in list(self._warm):
                self._drop(warm)
            await asyncio.gather(*self._beside)
        await self._backend.close()

    async def _made(self, image: Image) -> None:
        """Wait until an image is there; the first row has it made, for all."""
        making = self._images.get(image)
        if making is None or self._may_work_now(making):
            task = asyncio.create_task(self._make(image), name=f"image {image.name}")
            making = self._images[image] = _ImageInTheMaking(task)
        if not making.task.done():
            self._waiting[image] += 1
            self.wake()
            try:
                await asyncio.wait({making.task})
            finally:
                self._waiting[image] -= 1
        making.task.result()

    def _may_work_now(self, making: _ImageInTheMaking) -> bool:
        """Whether a failure is to be tried again: of the engine at once, of the image after a while."""
        if not making.task.done():
            return False
        if making.task.cancelled():
            return True
        error = making.task.exception()
        lasting = isinstance(error, ImageError)
        return error is not None and not (lasting and time.monotonic() < making.began + TRY_AGAIN_S)

    async def _make(self, image: Image) -> None:
        try:
            async with self._starts:
                await self._backend.prepare(image)
        except Exception:
            self.stats.failed += 1
            raise

    async def _take(self, wanted: tuple[Image, BoxLimits], row: str) -> Box:
        """A warm box, or a new one."""
        for warm in list(self._warm):
            if warm.started < time.monotonic() - FRESH_S:
                self._drop(warm)
            elif warm.wanted == wanted:
                self._warm.remove(warm)
                self.stats.warm += 1
                return warm.box
        while self._warm and self.running + len(self._warm) > self._config.boxes:
            self._drop(self._warm[0])
        return await self._start(wanted, row)

    async def _start(self, wanted: tuple[Image, BoxLimits], row: str) -> Box:
        image, limits = wanted
        async with self._starts:
            began = time.monotonic()
            try:
                box = await self._backend.start(image, limits, row=row)
            except Exception:
                self.stats.failed += 1
                raise
            self.stats.started += 1
            self.stats.start_s += time.monotonic() - began
            return box

    def _refill(self, wanted: tuple[Image, BoxLimits]) -> None:
        """Start another one like it, where `warm` and `boxes` leave room: rows of a group follow each other."""
        there = sum(warm.wanted == wanted for warm in self._warm) + self._warming
        room = self._config.boxes - self.running - len(self._warm) - self._warming
        for _ in range(min(self._config.warm - there, room)):
            self._warming += 1
            self._do(self._start_warm(wanted))

    async def _start_warm(self, wanted: tuple[Image, BoxLimits]) -> None:
        started = time.monotonic()
        try:
            box = await self._start(wanted, "")
        except Exception as error:
            log.debug("no warm box of %s: %s", wanted[0].name, error)
        else:
            self._warm.append(_Warm(wanted, box, started))
        finally:
            self._warming -= 1

    def _drop(self, warm: _Warm) -> None:
        self._warm.remove(warm)
        self._do(self._close(warm.box))

    async def _close(self, box: Box) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await box.close()
        except Exception as error:
            log.warning("the box %s could not be removed, the next sweep will: %s", box.name, error)

    def _do(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        return task
