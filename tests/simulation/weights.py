"""Surroundings of the weight plane: weights whose bytes say their version, carriers on simulated hosts, engines.

    coordinator ─▶ Replica ─▶ shm or disk, with SimulatedMemory and SimulatedThread ─▶ Joining ─▶ SimulatedEngine

Coordinator, transaction, replica controllers, joinings, carriers and version store are the product's. Each word of a
version's buckets is the token that an engine samples with it, so that wrong or mixed bytes show in the rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from fsspec.implementations.memory import MemoryFileSystem
from typing_extensions import override

from meshrl.config.weights import WeightsConfig
from meshrl.contract.errors import ConfigError
from meshrl.contract.types import TensorSpec, Uint8, Version, WeightManifest
from meshrl.weights.carrier import Channel, Link, RunPaths
from meshrl.weights.carriers import auto, disk, shm
from meshrl.weights.messages import digest
from meshrl.weights.transport import Pairs, Transport
from tests.simulation.engine import SimulatedEngine, token_of
from tests.simulation.host import Memory, SimulatedThread, Takes, this_process
from tests.simulation.loop import Process, SimulatedLoop
from tests.simulation.shape import RUN, Shape

WORDS: Final = 8
BUCKETS: Final = 2
BEAT_S: Final = 15.0
SILENCE_S: Final = 45.0
"""Longer than in a real mesh: heartbeats, and waiting for them, are most of what an idle fleet does."""
CORRUPT_S: Final = 2.0
"""A transfer that changes bytes also takes long: versions overtake it."""
DRAIN_S: Final = 300.0


class QuietConfig(WeightsConfig):
    """Beats more rarely than a real mesh."""

    @property
    def beat_s(self) -> float:
        """Seconds between heartbeats."""
        return BEAT_S


class SimulatedSource:
    """A WeightSource: two buckets, full of the version's token."""

    def __init__(self, version: Version) -> None:
        self._bucket = np.full(WORDS, token_of(version), np.uint32).view(np.uint8)
        self._bucket.flags.writeable = False
        nbytes = self._bucket.nbytes
        self.manifest = WeightManifest(
            run=RUN,
            version=version,
            tensors=tuple(
                TensorSpec(
                    name=f"layer.{index}",
                    dtype="float32",
                    shape=(WORDS,),
                    bucket=index,
                    offset=0,
                    nbytes=nbytes,
                )
                for index in range(BUCKETS)
            ),
            bucket_bytes=(nbytes,) * BUCKETS,
            bucket_hashes=(digest(self._bucket),) * BUCKETS,
        )

    def bucket(self, index: int) -> Uint8:
        """uint8[bucket_bytes[index]]."""
        return self._bucket


class Transfers:
    """Faults of the bytes that reach one process, each until a moment of the virtual clock."""

    def __init__(self) -> None:
        self.hanging_until = 0.0
        self.corrupt_until = 0.0


class _Receiving(Channel):
    """A replica's end of a channel: bytes may come late, or wrong."""

    def __init__(self, channel: Channel, transfers: Transfers) -> None:
        self._channel = channel
        self._transfers = transfers
        self._clock = asyncio.get_running_loop().time

    @override
    async def open(self, deadline_s: float) -> None:
        await self._channel.open(deadline_s)

    @override
    async def send(self, manifest: WeightManifest, index: int, bucket: Uint8) -> None:
        await self._channel.send(manifest, index, bucket)

    @override
    def committed(self, version: Version) -> None:
        self._channel.committed(version)

    @override
    def abort(self) -> None:
        self._channel.abort()

    @override
    async def close(self) -> None:
        await self._channel.close()

    @override
    async def receive(self, manifest: WeightManifest, index: int, into: Uint8) -> Uint8 | None:
        found = await self._channel.receive(manifest, index, into)
        if (late_s := self._transfers.hanging_until - self._clock()) > 0:
            await asyncio.sleep(late_s)
        if self._transfers.corrupt_until > self._clock():
            await asyncio.sleep(CORRUPT_S)
            found = np.array(into if found is None else found)
            found[0] ^= 1
        return found


class WeightSurroundings:
    """State that all processes of a run share."""

    def __init__(
        self,
        loop: SimulatedLoop,
        shape: Shape,
        takes: Callable[[float], Takes],
        problem: Callable[[str], None],
        *,
        shm: type[shm.Carrier],
    ) -> None:
        """`takes` makes the time of something from its mean."""
        self.memory = Memory(loop.time, problem)
        self.served: set[Version] = set()
        """Versions that some engine has served."""
        self.engines: dict[Process, SimulatedEngine] = {}
        self._shm = shm
        self._problem = problem
        self._takes = takes(shape.transfer_s)
        self._transfers: dict[str, Transfers] = {}
        self._folder = f"/simulated-{id(self)}"
        self.config = QuietConfig(
            carrier=shape.carrier,
            directory=f"memory:/{self._folder}",
            anchor_every=shape.anchor_every,
            late_quorum=shape.late_quorum,
            silence_s=SILENCE_S,
        )
        self.paths = RunPaths(directory=Path("simulated"))

    def transfers(self, name: str) -> Transfers:
        """Faults of transfers to the process `name`."""
        return self._transfers.setdefault(name, Transfers())

    def transport(self) -> Transport:
        """The transport of the process that runs."""
        if self.config.carrier == "auto":
            return auto.Carrier(self.config, self.paths, self._load)
        return self._load(self.config, self.paths)

    def _load(self, config: WeightsConfig, paths: RunPaths) -> Pairs:
        process = this_process()
        carrier: Any
        if config.carrier == "shm":
            memory = self.memory.of(process)
            carrier = self._shm(config, paths, memory=memory, thread=self._thread)
        elif config.carrier == "disk":
            carrier = disk.Carrier(config, paths, thread=self._thread)
        else:
            raise ConfigError(f"carrier {config.carrier} is not simulated")
        whole: Callable[[Link], Channel] = carrier.channel

        def channel(link: Link) -> Channel:
            end = whole(link)
            return end if link.rank == 0 else _Receiving(end, self.transfers(process.name))

        carrier.channel = channel
        return carrier  # type: ignore[no-any-return]

    def _thread(self, name: str) -> SimulatedThread:
        return SimulatedThread(name, self._takes)

    def join(self, engine: SimulatedEngine) -> None:
        """An engine of the process that runs."""
        process = this_process()
        self.engines[process] = engine
        process.on_death[lambda: self.engines.pop(process, None)] = None

    def committed(self, version: Version) -> None:
        """The coordinator is about to tell the queue."""
        if version not in self.served:
            self._problem(f"the queue is told of version {version}, which no engine has served")

    def check_end(self) -> None:
        """Everything has ended or is dead."""
        left = [name for name, file in self.memory.files.items() if file.owner.dead]
        if left:
            self._problem(f"{len(left)} files stay in shared memory: {left[0].partition('-')[0]}")

    def close(self) -> None:
        """Forget the versions that were stored."""
        files = MemoryFileSystem()
        if files.exists(self._folder):
            files.rm(self._folder, recursive=True)
