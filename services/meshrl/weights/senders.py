"""Who sends a version to a replica: the trainer, or the replica before it in the chain.

    trainer ══▶ replica 3 ══▶ replica 4 ══▶ replica 7        each sends on what it has received and verified

The trainer's end of the network carries a version once, however many replicas there are. A bucket is asked of a
sender only when it has acknowledged it, so no deadline counts the time that somebody further up takes. A sender that
fails, or a channel between two replicas that does, ends nobody: the trainer sends what is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from meshrl.contract.errors import InfraError, MeshError, UnavailableError
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Version
from meshrl.v1 import weights_pb2 as pb
from meshrl.weights.carrier import Channel, Link
from meshrl.weights.waiting import unless

_T = TypeVar("_T")


class RelayError(InfraError):
    """A replica gets nothing from the one that should send to it."""


class Progress:
    """What a replica holds of the version that it is brought, for those behind it."""

    def __init__(self) -> None:
        self.version: Version | None = None
        self.out = asyncio.Event()
        """It died, hung or left."""
        self._ended = False
        """It gets nothing more of this version."""
        self._held: set[int] = set()
        self._changed = asyncio.Event()

    def begin(self, version: Version) -> None:
        """It was proposed this version."""
        self.version, self._ended, self._held = version, False, set()
        self._notify()

    def holds(self, index: int) -> None:
        """It has acknowledged a bucket."""
        self._held.add(index)
        self._notify()

    def end(self) -> None:
        """It was told to switch or to forget: nobody may wait for what it does not hold."""
        self._ended = True
        self._notify()

    def leave(self) -> None:
        """It is out: nobody may wait for it at all."""
        self.out.set()
        self.end()

    def may_hold(self, version: Version) -> bool:
        """Whether it holds `version`, to be sent on, or may yet be brought it."""
        if self.out.is_set():
            return False
        if self.version is None or self.version < version:
            return True
        return self.version == version and not self._ended

    async def until_held(self, version: Version, index: int) -> None:
        """Return once it holds the bucket. Raises RelayError when it never will."""
        while not (self.version == version and index in self._held):
            if not self.may_hold(version):
                raise RelayError(f"the sender of weights {version} is out")
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class FromTrainer:
    """Sends from the source, through a channel of this process."""

    hop = 0

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def until_held(self, version: Version, index: int) -> None:
        """The trainer holds everything."""

    async def send(self, source: WeightSource, index: int) -> None:
        """See Channel."""
        await self._channel.send(source.manifest, index, source.bucket(index))


class FromReplica:
    """Has another replica send."""

    def __init__(
        self,
        generation: int,
        progress: Progress,
        send: Callable[[Version, pb.PlaneRelay], Awaitable[None]],
        link: Link,
        carrier: str,
    ) -> None:
        """`send` sends the other replica, `generation`, an order; `link` is the channel between the two."""
        self.generation = generation
        self.carrier = carrier
        self.hop = link.hop
        self._progress = progress
        self._send = send
        self._link = link

    @property
    def is_out(self) -> bool:
        """Whether it died, hung or left."""
        return self._progress.out.is_set()

    async def while_in(self, work: Awaitable[_T]) -> _T:
        """The result of `work`. Raises RelayError as soon as the sender is out."""
        try:
            return await unless(self._progress.out, work, "the sender is out")
        except UnavailableError as error:
            raise RelayError(str(error)) from error

    async def open(self, version: Version) -> None:
        """Have it open its end; it answers nothing. Raises RelayError."""
        await self._order(version)

    async def until_held(self, version: Version, index: int) -> None:
        """Return once it holds the bucket. Raises RelayError."""
        await self._progress.until_held(version, index)

    async def send(self, source: WeightSource, index: int) -> None:
        """Raises RelayError."""
        await self._order(source.manifest.version, buckets=[index])

    async def done(self, version: Version) -> None:
        """The receiver has everything: it need keep nothing for it. Raises RelayError."""
        await self._order(version, done=True)

    async def close(self, version: Version) -> None:
        """The channel is of no use any more. Raises RelayError."""
        await self._order(version, close=True)

    async def _order(
        self,
        version: Version,
        *,
        buckets: Sequence[int] = (),
        done: bool = False,
        close: bool = False,
    ) -> None:
        order = pb.PlaneRelay(
            generation=self._link.generation,
            hop=self.hop,
            endpoint=self._link.endpoint,
            carrier=self.carrier,
            buckets=buckets,
            done=done,
            close=close,
        )
        try:
            await self._send(version, order)
        except MeshError as error:
            raise RelayError(f"the sender of weights {version} is out: {error}") from error
