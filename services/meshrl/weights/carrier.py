"""A carrier's two ends: how the bytes of a version get from the trainer's process to replicas, bucket by bucket."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import UnavailableError
from meshrl.contract.ports import DeviceReceiver, LentBucket, WeightSource
from meshrl.contract.types import Uint8, Version, WeightManifest
from meshrl.weights.shared_memory import FOLDER, boot_id


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPaths:
    """Paths of the run and the model in one process."""

    directory: Path
    """The run's directory; the two ends may see it under different paths."""
    model_path: Path | None = None
    """The checkpoint whose config and tokenizer are copied beside weights that are written to disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Identity of a channel, equal at both ends; the trainer's process decides it and sends it."""

    run: str
    epoch: int
    generation: int
    endpoint: str
    rank: int
    """0 is the trainer's end."""
    group: int = 0
    """Numbers the channels of more than two ends in one epoch; `generation` says nothing then."""
    size: int = 2

    @property
    def prefix(self) -> str:
        """Names the channel among all channels that ever use the endpoint."""
        if self.group:
            return f"{self.run}/e{self.epoch}/all{self.group}"
        return f"{self.run}/e{self.epoch}/g{self.generation}"


class Channel(Protocol):
    """One end of the connection between the trainer and one replica, for one generation; or all replicas.

    Each end overrides what it does: the trainer's sends, a replica's receives.

    Buckets are sent and received in the same order. A channel that failed once is of no further use. One that sends
    what changed has `moved_bytes` too: what travelled of the bucket that was received last.
    """

    async def open(self, deadline_s: float) -> None:
        """Connect to the other end. Raises UnavailableError."""
        return

    async def send(self, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
        """Send one bucket; sending it again in this channel repairs what arrived before. Raises UnavailableError."""
        raise UnavailableError("a replica's end of a channel does not send")

    async def receive(self, manifest: WeightManifest, index: int, into: Uint8) -> Uint8 | None:
        """Fill `into`, uint8[bucket_bytes[index]], or return memory that holds the bucket already.

        The result stays unchanged while it is referenced.

        Raises UnavailableError; CorruptError when what arrived cannot even be read.
        """
        raise UnavailableError("the trainer's end of a channel does not receive")

    def committed(self, version: Version) -> None:
        """Note that the replica's engine serves `version`. Called on both ends; most carriers ignore it."""
        return

    def abort(self) -> None:
        """Give everything up at once; never waits, idempotent."""
        return

    async def close(self) -> None:
        """End the channel in an orderly way; idempotent."""
        self.abort()


@runtime_checkable
class DeviceChannel(Channel, Protocol):
    """A channel whose bytes can arrive in device memory that an engine lends."""

    @property
    def device(self) -> DeviceReceiver | None:
        """This end of an open link, which opens that memory; None if it cannot."""
        ...

    async def receive_lent(self, bucket: LentBucket) -> str:
        """`receive` into it; the chunk digest of what lies there then. Raises UnavailableError."""
        ...


class Moved:
    """The buckets that one end of a channel has moved, forgotten with the first bucket of a newer version.

    A channel lives as long as the run.
    """

    def __init__(self) -> None:
        self._moved: dict[Version, set[int]] = {}

    def again(self, version: Version, index: int) -> bool:
        """Note that a bucket is moved; True if it was before, so that what arrived then was corrupted."""
        if version not in self._moved:
            self._moved = {at: self._moved[at] for at in self._moved if at > version}
            self._moved[version] = set()
        again = index in self._moved[version]
        self._moved[version].add(index)
        return again


class Carrier(Protocol):
    """A user's carrier of 0.2; until 0.3 `transport.WholeVersions` makes a transport of it."""

    def __init__(self, config: WeightsConfig, paths: RunPaths) -> None: ...

    async def listen(self) -> str:
        """See `transport.Pairs`."""
        ...

    async def stage(self, source: WeightSource) -> None:
        """Called with a version that is whole."""
        ...

    def channel(self, link: Link) -> Channel:
        """One end of a channel, not yet open."""
        ...

    async def close(self) -> None:
        """Free everything; idempotent."""
        ...


def host_id() -> str:
    """The kernel and its shared memory: equal for two processes that can share memory. Empty when unknown."""
    boot = boot_id()
    try:
        return f"{boot}/{FOLDER.stat().st_dev}" if boot else ""
    except OSError:
        return ""
