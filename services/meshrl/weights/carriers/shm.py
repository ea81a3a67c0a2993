"""Weights through shared memory of one host: written once per version, mapped by every replica, copied by none.

    trainer     send ─▶ /dev/shm/meshrl-<nonce>-<run>-<epoch>.<step>.weights ◀─mmap─ replica, replica, …

A version is one file, a bucket a page-aligned part of it, written when it has been gathered; its room is taken
before. Every generation reads the same file. A replica maps its
pages (private, copy on write), so the engine gets the same memory that was hashed, and a deleted file stays readable
for those that have mapped it.

**What is left behind.** Nothing by a replica: it creates no file. A trainer holds a lock on each of its files, which
ends when it dies; files without a lock are deleted by the trainer that takes over (`listen`) and by the replicas
that lost their trainer (`close`). At most `weights.keep` versions are there at once, and an older one while a replica
is brought it.

**One host.** The endpoint names a probe file of the trainer's (boot id and an unguessable name); a replica that
cannot open it is on another host, in another container without this /dev/shm, or another user, and refuses.
"""

from __future__ import annotations

import itertools
import json
import mmap
import re
import secrets
from collections.abc import Callable

import numpy as np
from typing_extensions import override

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import CapacityError, ConfigError, UnavailableError
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Uint8, Version, WeightManifest
from meshrl.weights.carrier import Channel, Link, Moved, RunPaths
from meshrl.weights.messages import Peer
from meshrl.weights.shared_memory import PROBES, Mapped, Offer, Probe, SharedMemory, boot_id
from meshrl.weights.transport import Pairs, Step
from meshrl.weights.waiting import WorkerThread

PATTERN = "meshrl-*.weights"
_NONCE = re.compile(r"[0-9a-f]{16}")


class Carrier(Pairs):
    """On the trainer's side, the files; on a replica's, nothing."""

    def __init__(
        self,
        config: WeightsConfig,
        paths: RunPaths,
        *,
        memory: SharedMemory | None = None,
        thread: Callable[[str], WorkerThread] = WorkerThread,
    ) -> None:
        """`memory` is this process's view of the folder; None: /dev/shm."""
        super().__init__(config)
        self.memory = memory or SharedMemory()
        self._keep = config.keep
        self._thread = thread("weights-shm")
        self._nonce = secrets.token_hex(8)
        self._probe: Probe | None = None
        self._segments: dict[Version, Segment] = {}

    @override
    def reaches(self, peer: Peer) -> bool:
        return peer.shares_memory and super().reaches(peer)

    @override
    async def listen(self) -> str:
        """Delete files of dead trainers; returns the endpoint, which only this host can open. Raises ConfigError."""
        self.memory.sweep(PATTERN)
        try:
            self._probe = Probe(self.memory)
        except CapacityError as error:
            raise ConfigError(f"weights.carrier=shm: {error}") from error
        offer = self._probe.offer
        return json.dumps({"boot": offer.boot_id, "probe": offer.name, "nonce": self._nonce})

    @override
    async def stage(self, source: WeightSource) -> None:
        """Make the file of the version, once for all replicas. Raises CapacityError when it does not fit."""
        await self._thread.run(self._segment, source.manifest)

    @override
    def channel(self, link: Link) -> Channel:
        return ShmWriter(self) if link.rank == 0 else ShmReader(link, self.memory)

    @override
    async def close(self) -> None:
        """Delete all files; what replicas have mapped stays readable for them."""
        for segment in [*self._segments.values()]:
            segment.unlink()
        # The thread may be writing one of them: its descriptor is closed after that.
        self._thread.close(self._close_segments)
        if self._probe is not None:
            self._probe.close()

    @override
    async def hand_over(
        self, channel: Channel, source: WeightSource, index: int, announce: Step
    ) -> None:
        """Write the bucket before it is announced: a replica looks for it at once."""
        await channel.send(source.manifest, index, source.bucket(index))
        await announce()

    async def write(
        self, manifest: WeightManifest, index: int, bucket: Uint8, *, again: bool
    ) -> None:
        """Write one bucket that is not there, also of a version that was deleted; `again`: it was read corrupted."""

        def write() -> None:
            segment = self._segment(manifest)
            if again or index not in segment.written:
                segment.write(index, bucket)

        await self._thread.run(write)

    def _close_segments(self) -> None:
        while self._segments:
            self._segments.popitem()[1].close()

    def _segment(self, manifest: WeightManifest) -> Segment:
        """The file to write the version to: one beside those that are kept where it is older than they are."""
        version = manifest.version
        if version not in self._segments:
            for old in sorted({*self._segments, version})[: -self._keep]:
                if old != version:
                    self._segments.pop(old).close()
            segment = Segment(self.memory, segment_name(self._nonce, manifest), manifest)
            self._segments[version] = segment
        return self._segments[version]


class Segment:
    """The file of one version, locked for as long as its owner lives. Written, never mapped, by the owner."""

    def __init__(self, memory: SharedMemory, name: str, manifest: WeightManifest) -> None:
        """Create the file. Raises CapacityError."""
        self.written: set[int] = set()
        """Buckets that are there whole."""
        self._memory = memory
        self._name = name
        self._offsets = offsets(manifest)
        self._size = self._offsets[-1]
        try:
            self._descriptor = memory.create(name, self._size)
        except OSError as error:
            raise self._no_room(error) from error

    def write(self, index: int, bucket: Uint8) -> None:
        """Write one bucket at its offset. Raises CapacityError."""
        try:
            self._memory.write(self._descriptor, self._offsets[index], bucket.data)
        except OSError as error:
            raise self._no_room(error) from error
        self.written.add(index)

    def unlink(self) -> None:
        """Take the file's name away; those that have mapped or opened it keep it."""
        self._memory.delete(self._name)

    def close(self) -> None:
        """Delete the file; on the thread that writes."""
        self.unlink()
        self._memory.close(self._descriptor)

    def _no_room(self, error: OSError) -> CapacityError:
        return CapacityError(
            f"no room for {self._size} bytes of weights in {self._memory.folder}: {error.strerror}; "
            "make it larger (containers: --shm-size) or set weights.carrier=gloo"
        )


class ShmWriter(Channel):
    """The trainer's end. The first of a version's writes each bucket, the others find it there."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._sent = Moved()

    @override
    async def send(self, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
        """Write the bucket if it is not there; a second time in any case. Raises UnavailableError."""
        again = self._sent.again(manifest.version, index)
        try:
            await self._carrier.write(manifest, index, bucket, again=again)
        except CapacityError as error:
            raise UnavailableError(str(error)) from error


class ShmReader(Channel):
    """A replica's end: maps versions and returns the mapped memory."""

    def __init__(self, link: Link, memory: SharedMemory) -> None:
        self._memory = memory
        self._endpoint = link.endpoint
        self._nonce = ""
        self._mapped: tuple[Version, Mapped] | None = None
        self._received = Moved()

    @override
    async def open(self, deadline_s: float) -> None:
        """Check that the trainer's shared memory is visible here. Raises ConfigError when it is not."""
        offer, self._nonce = _read_endpoint(self._endpoint)
        if not offer.is_reachable(self._memory):
            here, folder = boot_id(), self._memory.folder
            why = (
                f"this host's boot id is {here}, the trainer's {offer.boot_id}"
                if here != offer.boot_id
                else f"{folder / offer.name} cannot be opened here: another container or another user"
            )
            raise ConfigError(
                f"weights.carrier=shm needs trainer and rollout on one host, with one {folder}: {why}; "
                "set weights.carrier=gloo or auto"
            )

    @override
    async def receive(self, manifest: WeightManifest, index: int, into: Uint8) -> Uint8:
        """The bucket in a private mapping, not copied; valid for as long as the array is referred to."""
        if self._received.again(manifest.version, index):
            self._mapped = None  # it was wrong, and has been written again, perhaps in another file
        starts = offsets(manifest)
        if self._mapped is None or self._mapped[0] != manifest.version:
            name = segment_name(self._nonce, manifest)
            self._mapped = manifest.version, self._memory.map(name, starts[-1])
        content = np.frombuffer(self._mapped[1], dtype=np.uint8)
        return content[starts[index] : starts[index] + manifest.bucket_bytes[index]]

    @override
    def abort(self) -> None:
        """Drop the mapping, and delete the files of a dead trainer."""
        self._mapped = None
        for pattern in (PATTERN, PROBES):
            self._memory.sweep(pattern)


def offsets(manifest: WeightManifest) -> list[int]:
    """First byte of each bucket, at a page; the last item is the length of the file (at least a page)."""
    sizes = (-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE for nbytes in manifest.bucket_bytes)
    starts = list(itertools.accumulate(sizes, initial=0))
    starts[-1] = max(starts[-1], mmap.PAGESIZE)
    return starts


def segment_name(nonce: str, manifest: WeightManifest) -> str:
    """The file's name; characters of the run's name that a file name cannot hold become `_`."""
    run = re.sub(r"[^A-Za-z0-9_-]", "_", manifest.run)[:64]
    return f"meshrl-{nonce}-{run}-{manifest.version}.weights"


def _read_endpoint(endpoint: str) -> tuple[Offer, str]:
    try:
        fields = json.loads(endpoint)
        offer, nonce = Offer(boot_id=fields["boot"], name=fields["probe"]), fields["nonce"]
    except (ValueError, KeyError, TypeError) as error:
        raise UnavailableError(f"{endpoint!r} is not an endpoint of shared memory") from error
    if not isinstance(nonce, str) or not _NONCE.fullmatch(nonce):
        raise UnavailableError(f"{endpoint!r} is not an endpoint of shared memory")
    return offer, nonce
