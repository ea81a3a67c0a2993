"""Weights through a directory that both ends see: the run's own, or any path or URL that fsspec opens.

The trainer writes a version once; every replica reads it from there, so the number of replicas costs the trainer's
machine nothing. Without `weights.directory` that is <run.dir>/weights, and every version is a safetensors checkpoint
that any engine loads as it is. In `weights.directory` (s3://bucket/prefix, /mnt/shared/weights …) patches follow a
whole version: a joiner reads that and the patches after it, the others only the newest patch. See version_store.py
for what lies where. The receiver checks the bytes against the manifest. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from typing_extensions import override

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import CapacityError, ConfigError, UnavailableError
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Uint8, Version, WeightManifest
from meshrl.weights.carrier import Channel, Link, Moved, RunPaths
from meshrl.weights.delta.patches import Held
from meshrl.weights.messages import gathered, is_whole
from meshrl.weights.transport import Pairs
from meshrl.weights.version_store import MARK, VersionReader, VersionWriter, WeightStore
from meshrl.weights.waiting import WorkerThread, within

_T = TypeVar("_T")
FOLDER = "weights"
"""In the run's directory."""


class Carrier(Pairs):
    """On the trainer's side the writer of versions; on a replica's, the buckets that it holds."""

    def __init__(
        self,
        config: WeightsConfig,
        paths: RunPaths,
        *,
        thread: Callable[[str], WorkerThread] = WorkerThread,
    ) -> None:
        """Raises ConfigError when the store cannot be opened here."""
        super().__init__(config)
        self._store = WeightStore(config.directory or paths.directory / FOLDER)
        self.writer = VersionWriter(config, self._store, paths.model_path)
        self._new_thread = thread
        self.thread = thread("weights-disk")
        self._held = Held()

    @override
    async def listen(self) -> str:
        """Returns the store's path or URL.

        Raises:
            ConfigError: it cannot be written.
            WaitTimeoutError: it does not answer.
        """
        try:
            write = self.thread.run(self._store.write, MARK, b"{}\n")
            await within(write, self.config.deadline_s(0), f"writing to {self._store.url}")
        except CapacityError as error:
            raise ConfigError(f"weights.directory: {error}") from error
        return self._store.url

    @override
    async def stage(self, source: WeightSource) -> None:
        """Write the version, once for all replicas: each bucket while the next one is gathered.

        Raises CapacityError, SourceError, UnavailableError, WaitTimeoutError.
        """
        nbytes = source.manifest.total_bytes
        if is_whole(source):
            await self._writing(self.writer.write, source, nbytes=nbytes)
            return
        draft = self.writer.begin(source)
        for index, size in enumerate(source.manifest.bucket_bytes):
            await gathered(source, index)
            await self._writing(draft.add, index, nbytes=size)
        await self._writing(self.writer.finish, draft, nbytes=nbytes)

    async def _writing(self, call: Callable[[_T], None], what: _T, *, nbytes: int) -> None:
        write = self.thread.run(call, what)
        await within(write, self.config.deadline_s(nbytes), f"writing to {self._store.url}")

    @override
    def channel(self, link: Link) -> Channel:
        if link.rank == 0:
            return DiskSender(self)
        thread = self._new_thread(f"weights-disk-{link.generation}")
        return DiskReceiver(self.config, link, self._store, self._held, thread)

    @override
    async def close(self) -> None:
        """Close the thread; the newest versions stay where they are."""
        self.thread.close()


class DiskSender(Channel):
    """The trainer's end: only repairs buckets."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._sent = Moved()

    @override
    async def send(self, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
        """Does nothing the first time, because the version is staged; a second time, writes the bucket whole."""
        if self._sent.again(manifest.version, index):
            try:
                await self._carrier.thread.run(self._carrier.writer.repair, manifest, index, bucket)
            except CapacityError as error:
                raise UnavailableError(str(error)) from error


class DiskReceiver(Channel):
    """A replica's end: reads what it lacks, in a thread of its own, so that a slow disk delays only this replica."""

    def __init__(
        self,
        config: WeightsConfig,
        link: Link,
        store: WeightStore,
        held: Held,
        thread: WorkerThread,
    ) -> None:
        self.config = config
        self._held = held
        self._reader = VersionReader(store, link.run, held)
        self._thread = thread
        self._requested = Moved()
        self.moved_bytes = 0
        """Read for the bucket that was received last."""

    @override
    async def open(self, deadline_s: float) -> None:
        """Look for the trainer's store. Raises UnavailableError when this process does not see it."""
        await within(
            self._thread.run(self._reader.check), deadline_s, "a look at the weights' store"
        )

    @override
    async def receive(self, manifest: WeightManifest, index: int, into: Uint8) -> None:
        """Fill `into`; the second time, from the whole bucket that the trainer has written again.

        Raises WaitTimeoutError, too, where the read takes too long.
        """
        again = self._requested.again(manifest.version, index)
        if again:
            self._held.forget()

        def read() -> int:
            return self._reader.read(manifest, index, into, again=again)

        deadline_s = self.config.deadline_s(manifest.total_bytes)  # a joiner reads a chain
        reading = self._thread.run(read)
        what = f"bucket {index} of weights {manifest.version}"
        self.moved_bytes = await within(reading, deadline_s, what)
        if self.config.directory:  # else every version is whole, and none is the base of a patch
            self._held.arrived(manifest, index, into)

    @override
    def committed(self, version: Version) -> None:
        """Make the received buckets of `version` the base of the next patches."""
        self._held.commit(version)

    @override
    def abort(self) -> None:
        """Give up; a stuck read ends in its own thread. The held buckets stay, for the next channel."""
        self._thread.close()
