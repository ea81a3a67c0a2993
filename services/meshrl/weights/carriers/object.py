"""Weights through object storage, or any directory that fsspec opens: an anchor now and then, patches between.

Both ends open `weights.directory` (s3://bucket/prefix, /mnt/shared/weights …). The trainer writes a version once;
every replica reads it from there, a joiner the anchor and the patches after it, the others only the newest patch. So
the number of replicas costs the trainer's machine nothing. See chain.py for what lies where.
"""

from __future__ import annotations

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import CapacityError, ConfigError, UnavailableError
from meshrl.contract.ports import WeightSource
from meshrl.contract.types import Uint8, Version, WeightManifest
from meshrl.weights.carrier import Cell, Link, Place
from meshrl.weights.chain import MARK, ChainReader, ChainWriter, Store
from meshrl.weights.deadlines import within
from meshrl.weights.delta.held_versions import Held
from meshrl.weights.worker_thread import WorkerThread

REACH = "directory"
NEEDS = ("fsspec",)
RATE = 0.2e9
SPARSE = True


class Carrier:
    """On the trainer's side the chain; on a replica's, what it holds."""

    def __init__(self, config: WeightsConfig, place: Place) -> None:
        """Raises ConfigError when the store cannot be opened here."""
        self._config = config
        self._store = Store(config.directory)
        self.chain = ChainWriter(config, self._store, place.model_path)
        self.lane = WorkerThread("weights-object")
        self._held = Held()

    async def listen(self) -> str:
        """Returns the store's URL.

        Raises:
            ConfigError: it cannot be written.
            WaitTimeoutError: it does not answer.
        """
        try:
            write = self.lane.run(self._store.write, MARK, b"{}\n")
            await within(write, self._config.deadline_s(0), f"writing to {self._store.url}")
        except CapacityError as error:
            raise ConfigError(f"weights.directory: {error}") from error
        return self._config.directory

    async def stage(self, source: WeightSource) -> None:
        """Write the version, once for all replicas.

        Raises:
            CapacityError: the store refuses it.
            UnavailableError: the store cannot be reached.
            WaitTimeoutError: it takes longer than `min_bytes_per_s` allows.
        """
        nbytes = source.manifest.total_bytes
        write = self.lane.run(self.chain.write, source)
        await within(write, self._config.deadline_s(nbytes), f"writing to {self._store.url}")

    def cell(self, link: Link) -> Cell:
        """One end of a cell."""
        if link.rank == 0:
            return Sender(self)
        return Receiver(self._config, link, self._store, self._held)

    async def close(self) -> None:
        """Nothing stays open; the newest versions stay where they are."""
        self.lane.close()


class Sender:
    """The trainer's end: nothing to do but to repair."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._sent: set[tuple[Version, int]] = set()

    async def open(self, deadline_s: float) -> None:
        """Nobody to meet."""

    async def send(self, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
        """Nothing the first time, because the version is staged; a second time, write the bucket there whole."""
        key = manifest.version, index
        if key in self._sent:
            try:
                await self._carrier.lane.run(self._carrier.chain.repair, manifest, index, bucket)
            except CapacityError as error:
                raise UnavailableError(str(error)) from error
        self._sent.add(key)

    async def receive(self, manifest: WeightManifest, index: int, into: Uint8) -> None:
        """Only replicas receive."""
        raise UnavailableError("the trainer's end of a cell does not receive")

    def committed(self, version: Version) -> None:
        """Nothing: each replica knows what it holds."""

    def abort(self) -> None:
        """Nothing is held."""

    async def close(self) -> None:
        """Nothing is held."""


class Receiver:
    """A replica's end: reads what it lacks, in a thread of its own."""

    def __init__(self, config: WeightsConfig, link: Link, store: Store, held: Held) -> None:
        self._config = config
        self._held = held
        self._chain = ChainReader(store, link.run, held)
        self._lane = WorkerThread(f"weights-object-{link.generation}")
        self._asked: set[tuple[Version, int]] = set()

    async def open(self, deadline_s: float) -> None:
        """See the trainer's store. Raises UnavailableError when this process does not."""
        await within(self._lane.run(self._chain.check), deadline_s, "a look at weights.directory")

    async def send(self, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
        """Only the trainer sends."""
        raise UnavailableError("a replica's end of a cell does not send")

    async def receive(self, manifest: WeightManifest, index: int, into: Uint8) -> None:
        """Fill `into`; asked a second time, from the whole bucket that the trainer has put there.

        Raises:
            CorruptError: something is missing or cannot be read.
            UnavailableError: the store fails.
            WaitTimeoutError: it does not move.
        """
        key = manifest.version, index
        again = key in self._asked
        self._asked.add(key)
        if again:
            self._held.forget()

        def read() -> None:
            self._chain.read(manifest, index, into, again=again)

        patience = self._config.deadline_s(manifest.total_bytes)  # a joiner reads a chain
        await within(self._lane.run(read), patience, f"bucket {index} of weights {key[0]}")
        self._held.arrived(manifest, index, into)

    def committed(self, version: Version) -> None:
        """What arrived of `version` is what the next patches are applied to."""
        self._held.commit(version)

    def abort(self) -> None:
        """Leave; a read that is stuck ends in its own thread."""
        self._lane.close()

    async def close(self) -> None:
        """The same; what is held stays, for the next cell."""
        self._lane.close()
